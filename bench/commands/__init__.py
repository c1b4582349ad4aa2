"""Commands of `specdec-bench`, one file for each."""
