"""Results of all these as one page with plots."""
