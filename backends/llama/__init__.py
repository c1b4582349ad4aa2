"""The llama.cpp backend for GGUF files, in memory or streamed."""
