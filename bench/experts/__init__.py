"""Measurements of mixtures of experts and of their expert cache."""
