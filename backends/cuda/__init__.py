"""CUDA support for the torch backend."""
