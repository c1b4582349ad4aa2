"""What a model multiplies, from its config or header alone."""
