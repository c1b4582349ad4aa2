"""GGUF files on llama.cpp: one pass over a paged model."""
