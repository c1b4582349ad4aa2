"""What a GPU adds to the torch backend."""
