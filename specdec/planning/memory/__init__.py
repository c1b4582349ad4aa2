"""Who gets how much of the memory budget."""
