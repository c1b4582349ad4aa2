"""One measured child process, within limits, and what it leaves behind."""
