"""Which layers stay in memory, and how long a forward pass over the others takes."""
