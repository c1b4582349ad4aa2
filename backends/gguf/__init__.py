"""GGUF models before they run: headers, batch invariance, and samples for timing."""
