"""Bytes, files and memory; no models."""

PART_OF = "specdec-stream"
