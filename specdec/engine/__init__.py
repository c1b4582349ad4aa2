"""The engine: its thread, scheduler and KV cache manager, and the session of the loaded models."""
