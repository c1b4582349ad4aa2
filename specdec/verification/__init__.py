"""The tree of draft tokens, and the acceptance rules: pure functions."""
