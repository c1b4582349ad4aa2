"""Measurement of this machine's matrix products and passes, in the shapes of a model."""
