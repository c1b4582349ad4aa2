"""Location of each tensor of a safetensors or GGUF file, from untrusted headers."""
