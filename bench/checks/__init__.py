"""Do texts stay equal, and does anything break: checks, some of which run for hours."""
