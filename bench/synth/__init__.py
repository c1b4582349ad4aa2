"""Synthetic large models: a small one grown to any size, with the same output."""
