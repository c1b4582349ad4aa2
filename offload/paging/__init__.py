"""Layers of a mapped file, brought by moving pages to where they are expected."""
