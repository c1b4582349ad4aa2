"""Prompt files: JSON lines with `prompt`, or with `turns` of which the first is used.

A `category`, where there is one, is kept: results can be told by category. HumanEval's and
Spec-Bench's files are read as they are published.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import SpecdecError

BUILT_IN = Path(__file__).parent / "prompts.jsonl"
_NAMES = ("id", "task_id", "question_id")


class WorkloadError(SpecdecError):
    """A prompt file cannot be used."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a workload."""

    name: str
    text: str
    category: str = ""


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """Read the first `limit` prompts, or all when there are fewer or `limit` is None.

    Raises:
        WorkloadError: the file cannot be read, or a line is no prompt; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path}: byte {error.start} is not UTF-8 text") from None
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if limit is not None and len(prompts) == limit:
            break
        if line.strip():
            prompts.append(_parse(line, f"{path}:{number}", number))
    if not prompts:
        raise WorkloadError(f"{path} holds no prompt; give one JSON object with `prompt` per line")
    return prompts


def spread(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """`limit` prompts: the first of each category, then the second of each, and so on.

    Files keep their categories together, so the first so many would be of one kind.
    """
    seen: Counter[str] = Counter()
    turns = []
    for index, prompt in enumerate(prompts):
        turns.append((seen[prompt.category], index))
        seen[prompt.category] += 1
    return [prompts[index] for _, index in sorted(turns)[:limit]]


def _parse(line: str, place: str, number: int) -> Prompt:
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise WorkloadError(f"{place}: not JSON ({error}); give one object per line") from None
    if not isinstance(value, dict):
        raise WorkloadError(f"{place}: found {type(value).__name__}, not an object with `prompt`")
    text = _text_of(value, place)
    if not text.strip():
        raise WorkloadError(f"{place}: the prompt is empty")
    name = next((str(value[key]) for key in _NAMES if key in value), str(number))
    return Prompt(name, text, str(value.get("category") or ""))


def _text_of(value: dict[str, Any], place: str) -> str:
    if "prompt" in value:
        text = value["prompt"]
    elif "turns" in value:
        turns = value["turns"]
        if not isinstance(turns, list) or not turns:
            raise WorkloadError(f"{place}: `turns` must be a list with at least one text")
        text = turns[0]
    else:
        raise WorkloadError(f"{place}: neither `prompt` nor `turns` (keys: {', '.join(value)})")
    if not isinstance(text, str):
        raise WorkloadError(f"{place}: the prompt must be a text, found {type(text).__name__}")
    return text
