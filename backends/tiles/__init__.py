"""Compiled loops that decode tiles of stored matrices and multiply them while they are in cache."""
