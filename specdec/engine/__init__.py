"""The engine: requests, sequences, scheduler and KV cache manager of the loaded models."""
