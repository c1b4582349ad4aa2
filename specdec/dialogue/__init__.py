"""Dialogue formats: reasoning and tool calls in a model's output, and tools in its prompt."""
