"""This process and its child processes: memory, cgroups, threads, signals."""
