"""The `specdec-bench` command, one file for each of its commands."""
