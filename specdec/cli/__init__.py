"""The `specdec` command line: options and commands; errors become one line."""
