"""Machines of a Ray cluster: how to reach them, and which there are."""
