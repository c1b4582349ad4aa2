"""GGUF models before they are run: their headers, whether they are exact, samples to time."""
