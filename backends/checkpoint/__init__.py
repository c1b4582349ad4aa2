"""From a folder of safetensors to a model on the meta device, and which tensor is whose."""
