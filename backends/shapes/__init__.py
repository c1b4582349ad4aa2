"""Shapes of a model's matrices, from its config or header alone."""
