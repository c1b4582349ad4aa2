"""Trains the embedded pair."""
