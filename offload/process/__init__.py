"""This process and those that it starts: memory, cgroups, threads, signals."""
