"""Recurrent states of llama.cpp models: a sequence's states, and what a pass begins from."""
