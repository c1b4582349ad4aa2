"""Prompts to measure with."""
