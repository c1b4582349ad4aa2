"""Memory planning: division of the memory budget."""
