"""Layers of a mapped file, loaded by moving pages to the addresses where they are expected."""
