"""Where each tensor of a safetensors or GGUF file lies, read with distrust."""
