"""Measurements on a GPU, in one command."""
