"""Routed experts of mixtures: which are held in memory, and reads of those that are not."""
