"""All measurements on a GPU in one command."""
