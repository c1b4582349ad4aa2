"""Requests, their sequences and outputs: what the engine's steps compute."""
