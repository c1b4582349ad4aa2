"""The engine in a process of its own: what crosses the boundary, and both sides of it."""
