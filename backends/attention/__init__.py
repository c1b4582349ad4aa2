"""Attention: which keys each token of a pass sees, as layouts and masks, and the kernels."""
