"""Checks of equal outputs and of robustness, some of which run for hours."""
