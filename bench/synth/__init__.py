"""Models to measure with: a small one grown to any size, with the same text."""
