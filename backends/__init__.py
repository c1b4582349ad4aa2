"""Backends: models, tensors and KV caches behind one interface (`contract/backend.py`)."""

PART_OF = "specdec-stream"
