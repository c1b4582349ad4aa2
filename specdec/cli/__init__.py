"""The `specdec` command: options to calls, errors to one line."""
