"""Prompt files: JSON lines with `prompt`, or with `turns` of which the first is used.

An optional `category` is read, for results by category. HumanEval's and Spec-Bench's files are read
as published.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import SpecdecError
from offload.units import MIB, format_bytes
from specdec.opening import open_now

BUILT_IN = Path(__file__).parent / "prompts.jsonl"
MAX_FILE_BYTES = 64 * MIB  # HumanEval has 0.2
WARM_UP_TOKENS = 3
"""Warm-up tokens before anything is timed: the first pass sets up threads, caches and memory."""
_NAMES = ("id", "task_id", "question_id")


class PromptFileError(SpecdecError):
    """Invalid prompt file."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a file."""

    name: str
    text: str
    category: str = ""


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """Read the first `limit` prompts, or all if there are fewer or `limit` is None.

    Raises:
        PromptFileError: the file cannot be read, or a line is no prompt; names the line.
    """
    try:
        text = _read_bytes(path).decode("utf-8-sig")
    except OSError as error:
        raise PromptFileError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PromptFileError(f"{path}: byte {error.start} is not UTF-8 text") from None
    prompts: list[Prompt] = []
    # Not splitlines(), which would also split at characters that strings may contain.
    for number, line in enumerate(text.split("\n"), start=1):
        if limit is not None and len(prompts) == limit:
            break
        if line.strip():
            prompts.append(_parse(line, f"{path}:{number}", number))
    if not prompts:
        raise PromptFileError(
            f"{path} holds no prompt; give one JSON object with `prompt` per line"
        )
    return prompts


def _read_bytes(path: Path) -> bytes:
    """Return the whole file. Raises PromptFileError if it is larger than MAX_FILE_BYTES."""
    with open_now(path) as file:
        raw = file.read(MAX_FILE_BYTES + 1)
    if len(raw) > MAX_FILE_BYTES:
        raise PromptFileError(f"{path} has more than {format_bytes(MAX_FILE_BYTES)}: split it")
    return raw


def spread(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """Return `limit` prompts: the first of each category, then the second of each, and so on.

    Files group prompts by category, so the first `limit` would be of one kind.
    """
    seen: Counter[str] = Counter()
    turns = []
    for index, prompt in enumerate(prompts):
        turns.append((seen[prompt.category], index))
        seen[prompt.category] += 1
    return [prompts[index] for _, index in sorted(turns)[:limit]]


def describe_left_out(n_too_long: int, n_new: int) -> str:
    """Return a note on prompts that are not used (see bench.prompts.lengths)."""
    return f"prompts left out: {n_too_long}, too long for the context with {n_new} tokens more"


def _parse(line: str, place: str, number: int) -> Prompt:
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise PromptFileError(f"{place}: not JSON ({error}); give one object per line") from None
    if not isinstance(value, dict):
        raise PromptFileError(f"{place}: found {type(value).__name__}, not an object with `prompt`")
    text = _text_of(value, place)
    if not text.strip():
        raise PromptFileError(f"{place}: the prompt is empty")
    name = next((str(value[key]) for key in _NAMES if key in value), str(number))
    return Prompt(name, text, str(value.get("category") or ""))


def _text_of(value: dict[str, Any], place: str) -> str:
    if "prompt" in value:
        text = value["prompt"]
    elif "turns" in value:
        turns = value["turns"]
        if not isinstance(turns, list) or not turns:
            raise PromptFileError(f"{place}: `turns` must be a list with at least one text")
        text = turns[0]
    else:
        raise PromptFileError(f"{place}: neither `prompt` nor `turns` (keys: {', '.join(value)})")
    if not isinstance(text, str):
        raise PromptFileError(f"{place}: the prompt must be a text, found {type(text).__name__}")
    return text
