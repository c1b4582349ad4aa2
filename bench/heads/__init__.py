"""Draft heads for targets that were grown to measure with."""
