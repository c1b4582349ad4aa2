"""Keys and values of the torch backend: a pool of blocks that sequences share."""
