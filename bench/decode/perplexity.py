"""Perplexity of a model on a text, with each number format of its KV cache.

The tokens are cut into windows that do not overlap, and the second half of each is scored, so that
a token has at least half a window of context (as llama.cpp's llama-perplexity does):

    perplexity = exp(mean of -log p(token | tokens of its window before it))

Formats are compared token by token, since the same tokens are difficult with each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np

from backends.contract.backend import Backend
from backends.contract.sequence import SequenceInput
from bench.options import UsageMistake
from specdec.text.prompts import encode_prompt

TOKENS_PER_PASS = 64
"""Tokens with logits in one pass, which the plan has memory for."""
OWN = "own"
"""Name of the format that a model has if none is named."""


@dataclass(frozen=True)
class Scores:
    """Scores of the tokens of a text.

    losses float64 [tokens]: -log p(token), in nats.
    likeliest int64 [tokens]: the token of the largest logit in each place.
    """

    losses: np.ndarray
    likeliest: np.ndarray


@dataclass(frozen=True)
class PerplexitySpec:
    """Specification of a measurement.

    load: keywords of `specdec.load`; `ctx_size` is the length of a window.
    cache_types: (name, format of the keys, of the values), the first of which others are compared
        with; None: the model's own.
    """

    load: Mapping[str, Any]
    text: str
    cache_types: Sequence[tuple[str, str | None, str | None]]
    max_windows: int | None = None


def measure(spec: PerplexitySpec, out: TextIO) -> list[dict[str, Any]]:
    """Return a row for each format; progress goes to `out`."""
    rows: list[dict[str, Any]] = []
    first: Scores | None = None
    for name, keys, values in spec.cache_types:
        row, scores = _measure_type(spec, keys, values)
        first = first or scores
        rows.append({"name": name, **row, **compare(scores, first)})
        print(f"{name}: perplexity {row['perplexity']:.4f}", file=out)
    return rows


def _measure_type(
    spec: PerplexitySpec, keys: str | None, values: str | None
) -> tuple[dict[str, Any], Scores]:
    from specdec.api import load

    # N-grams need no model, and a plan with them has memory for the logits of a pass.
    options = {"spec_type": "ngram", "num_draft_tokens": TOKENS_PER_PASS, "parallel": 1}
    types = {"cache_type_k": keys, "cache_type_v": values}
    with load(**{**spec.load, **options, **types}) as llm:
        token_ids = encode_prompt(spec.text, llm.tokenizer)
        scores, kv_bytes = score_text(
            llm.target, token_ids, llm.plan.ctx_size, spec.max_windows or len(token_ids)
        )
        row = {
            "cache_type_k": llm.plan.cache_types[0],
            "cache_type_v": llm.plan.cache_types[1],
            "kv_bytes_per_token": kv_bytes,
            "is_exact": llm.plan.exactness.is_exact,
        }
    return {**row, **summarise(scores)}, scores


def score_text(
    backend: Backend, token_ids: list[int], window: int, max_windows: int
) -> tuple[Scores, int]:
    """Score the second half of each window; return also the KV cache's bytes per token.

    Raises UsageMistake for a text that is shorter than a window.
    """
    starts = range(0, len(token_ids) - window + 1, window)[:max_windows]
    if not starts:
        raise UsageMistake(
            f"the text has {len(token_ids)} tokens, less than a window of {window}: give a longer "
            "--text, or a smaller -c"
        )
    kv_bytes = 0
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    for start in starts:
        parts += _score_window(backend, token_ids[start : start + window])
        kv_bytes = kv_bytes or backend.kv_bytes // max(1, backend.n_kv_allocated)
    losses, likeliest = (np.concatenate(x) for x in zip(*parts, strict=True))
    return Scores(losses, likeliest), kv_bytes


def _score_window(
    backend: Backend, token_ids: list[int]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield losses and likeliest tokens of the second half, a pass at a time."""
    first, sequence = len(token_ids) // 2, backend.new_sequence()
    try:
        if first > 1:
            backend.forward([SequenceInput(sequence, token_ids[: first - 1], logits_at=())])
        for start in range(first - 1, len(token_ids) - 1, TOKENS_PER_PASS):
            end = min(start + TOKENS_PER_PASS, len(token_ids) - 1)
            scored = SequenceInput(sequence, token_ids[start:end], logits_at=range(end - start))
            output = backend.forward([scored])[0]
            yield _score(output.logits, token_ids[start + 1 : end + 1])
    finally:
        sequence.close()


def _score(logits: np.ndarray, token_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return losses and likeliest tokens for logits [tokens, vocabulary] of the places before."""
    likeliest = logits.argmax(-1)
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    own = shifted[np.arange(len(token_ids)), token_ids]
    return np.log(np.exp(shifted).sum(-1)) - own, likeliest


def summarise(scores: Scores) -> dict[str, Any]:
    """Return the number of tokens, their perplexity, and its standard error."""
    perplexity = float(np.exp(scores.losses.mean()))
    error = perplexity * _standard_error(scores.losses)
    return {
        "n_tokens": len(scores.losses),
        "perplexity": perplexity,
        "perplexity_error": error,
    }


def compare(scores: Scores, first: Scores) -> dict[str, Any]:
    """Return how the perplexity of the same tokens differs from `first`, as a fraction with its
    standard error, and the share of places with the same likeliest token."""
    differences = scores.losses - first.losses
    change = float(np.expm1(differences.mean()))
    return {
        "perplexity_change": change,
        "perplexity_change_error": (1.0 + change) * _standard_error(differences),
        "same_likeliest_fraction": float((scores.likeliest == first.likeliest).mean()),
    }


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0
