"""Prompts of the benchmarks."""
