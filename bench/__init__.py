"""Benchmarks, and the models that they need; uses specdec like any other program."""

PART_OF = "specdec-stream"
