"""Measurements of decoding speed, with and without a draft."""
