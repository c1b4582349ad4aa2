"""Sampling: choose the target's token from its logits."""
