"""Checkpoints on transformers and torch: one pass over a streamed model."""
