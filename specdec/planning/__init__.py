"""Who gets how much of the memory budget, and the speed to expect."""
