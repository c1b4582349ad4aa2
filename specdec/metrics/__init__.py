"""Figures of generations while they run."""
