"""Routed experts of mixtures: a cache of them in memory, and reads of those that miss."""
