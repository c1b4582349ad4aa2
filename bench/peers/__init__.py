"""Comparison of specdec with other programs, with the same weights, prompts and limits."""
