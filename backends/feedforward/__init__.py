"""Batch-invariant feed-forward layers: activations, linear layers, routers, experts."""
