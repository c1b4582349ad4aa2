"""Placement of layers, and the duration of a forward pass over the streamed ones."""
