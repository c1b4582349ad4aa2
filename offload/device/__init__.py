"""Layers on a device, in a ring of their own that is filled from pinned host memory."""
