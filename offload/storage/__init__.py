"""Checked reads around the page cache, and the aligned memory that they fill."""
