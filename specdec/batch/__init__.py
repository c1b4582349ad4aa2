"""Batch inference: prompts from a file, a record per prompt, a journal that survives kills."""
