"""The prompts of a measurement: files that `specdec.prompt_files` reads, and a built-in one."""

from __future__ import annotations

from pathlib import Path

from specdec.prompt_files import Prompt, PromptFileError, read_prompts, spread

BUILT_IN = Path(__file__).parent / "prompts.jsonl"

__all__ = ["BUILT_IN", "Prompt", "PromptFileError", "read_prompts", "spread"]
