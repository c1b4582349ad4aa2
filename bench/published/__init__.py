"""Checkpoints of published shapes and formats, with random weights."""
