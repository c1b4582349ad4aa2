"""Measurements, and the models to measure with; uses specdec like any other program."""
