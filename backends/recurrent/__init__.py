"""Recurrent layers: states of sequences, trees through them, and one file for each kind."""
