"""Draft policy: tree sizes, and whether to draft at all."""
