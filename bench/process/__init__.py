"""Measured child processes within limits, and their results."""
