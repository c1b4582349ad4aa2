"""Do sequences stay equal, and does anything break: checks, some of which run for hours."""
