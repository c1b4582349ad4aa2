"""Packed copies of checkpoints: `specdec pack`."""
