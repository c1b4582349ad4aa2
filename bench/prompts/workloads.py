"""The prompts of a measurement: files that `bench.prompts.files` reads, and a built-in one."""

from __future__ import annotations

from pathlib import Path

from bench.prompts.files import Prompt, PromptFileError, read_prompts, spread

BUILT_IN = Path(__file__).parent / "prompts.jsonl"

__all__ = ["BUILT_IN", "Prompt", "PromptFileError", "describe_left_out", "read_prompts", "spread"]


def describe_left_out(n_too_long: int, n_new: int) -> str:
    """For people, where prompts of a file are not used (see bench.prompts.lengths)."""
    return f"prompts left out: {n_too_long}, too long for the context with {n_new} tokens more"
