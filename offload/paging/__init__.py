"""The same for a mapped file: pages are moved to where the layer is expected."""
