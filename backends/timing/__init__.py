"""How fast this machine multiplies, measured on the shapes of a model."""
