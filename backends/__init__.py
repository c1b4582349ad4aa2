"""Models, tensors and KV caches behind one contract (`contract/backend.py`)."""
