"""Checkpoint loading: a folder of safetensors to a model on the meta device and its tensors."""
