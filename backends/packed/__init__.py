"""Tensors in fewer bytes than they are computed with, decoded right before their use."""
