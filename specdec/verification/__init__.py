"""The tree of draft tokens, and how far the target agrees: pure functions."""
