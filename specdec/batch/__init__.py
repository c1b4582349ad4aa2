"""Many prompts from a file, a record for each of them, and a kill that loses nothing."""
