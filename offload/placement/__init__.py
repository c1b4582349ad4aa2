"""Which layers stay in memory, and how long a pass over the others takes."""
