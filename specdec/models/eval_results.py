"""eval_results.json beside a trained draft's weights: what was measured on held-out text.

    {"agreement": 0.6, "tokens_per_pass": 2.68, "num_draft_tokens": 8, "num_tokens": 16384,
     "text": ["src"], "target": "Qwen3-8B", "target_fingerprint": "0123456789abcdef"}

The file's name is that of transformers' Trainer, whose files have other fields: they are ignored.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

EVAL_RESULTS = "eval_results.json"
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class EvalResults:
    """Measurements of a draft on text that it was not trained on.

    Attributes:
        agreement: share of positions where its likeliest token is the target's.
        tokens_per_pass: mean tokens of a forward pass with greedy chains of `num_draft_tokens`.
        num_tokens: positions that were measured; None: not known.
        text: names of the files or folders that a part was held out of.
        target: the target's name.
        target_fingerprint: its `weights_fingerprint`.
    """

    agreement: float
    tokens_per_pass: float
    num_draft_tokens: int
    num_tokens: int | None
    text: tuple[str, ...]
    target: str
    target_fingerprint: str


def write_eval_results(folder: Path, results: EvalResults) -> None:
    text = json.dumps(asdict(results), indent=2) + "\n"
    (folder / EVAL_RESULTS).write_text(text, encoding="utf-8")


def read_eval_results(path: Path) -> EvalResults | None:
    """Return the results of a draft's folder; None without a file that has them.

    path: result of `resolve_model`; GGUF files have none.
    """
    file = path / EVAL_RESULTS
    try:
        if file.stat().st_size > _MAX_BYTES:
            return None
        raw = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(raw, dict) or not _is_possible(raw):
        return None
    values = {field.name: raw.get(field.name) for field in fields(EvalResults)}
    names = raw.get("text")
    text = tuple(str(name) for name in names) if isinstance(names, list) else ()
    return EvalResults(**{**values, "text": text})  # type: ignore[arg-type]  # checked


def _is_possible(raw: dict[str, Any]) -> bool:
    """Return whether a file's figures have the types and ranges of `EvalResults`."""
    agreement, tokens, chain = (
        raw.get(name) for name in ("agreement", "tokens_per_pass", "num_draft_tokens")
    )
    return (
        type(chain) is int
        and 1 <= chain <= 1024
        and isinstance(agreement, (int, float))
        and 0.0 <= agreement <= 1.0
        and isinstance(tokens, (int, float))
        and 1.0 <= tokens <= 1.0 + chain
        and isinstance(raw.get("target_fingerprint"), str)
    )
