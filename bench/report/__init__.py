"""Results of all benchmarks as one page with plots."""
