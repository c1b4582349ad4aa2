"""KV cache of the torch backend: a pool of blocks that sequences share (paged attention)."""
