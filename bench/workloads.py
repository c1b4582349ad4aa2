"""The prompts that a measurement takes unless told otherwise; `specdec.prompt_files` reads them."""

from __future__ import annotations

from pathlib import Path

BUILT_IN = Path(__file__).parent / "prompts.jsonl"
