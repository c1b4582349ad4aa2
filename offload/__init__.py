"""Bytes, files and memory; no models."""
