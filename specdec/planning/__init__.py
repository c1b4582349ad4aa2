"""The plan of a run: what is refused, how large a tree may get, the speed to expect."""
