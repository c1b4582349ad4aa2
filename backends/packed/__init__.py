"""Packed and quantised tensors, which are decoded right before their use."""
