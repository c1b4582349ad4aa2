"""The commands of `specdec`, one file for each."""
