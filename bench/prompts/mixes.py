"""Random mixes of sequences that run at the same time, the same for the same seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_SEQS, MAX_NEW_TOKENS, N_NODES = 6, 32, 16
DRAFTING: tuple[dict[str, Any], ...] = (
    {"spec_type": ()},
    {"num_draft_tokens": 8, "draft_depth": 8, "tree_width": 1},
    {"num_draft_tokens": N_NODES, "draft_depth": 8},
    {"spec_type": ("ngram",)},
)
"""Options of SpecConfig: none, chains, trees, n-grams."""
_P_SHARED, _P_SAMPLED, _P_CANCELLED = 0.4, 0.5, 0.3
_MEAN_DELAY = 0.2


@dataclass(frozen=True)
class Call:
    """One sequence of a mix.

    drafting: index in DRAFTING.
    cancelled_after: its tokens; 0: in its prompt, `delay` seconds after its start; None: it ends.
    delay: otherwise the seconds before it starts.
    """

    prompt: tuple[int, ...]
    sampling: dict[str, Any]
    drafting: int
    delay: float
    cancelled_after: int | None


def mixes_of(seed: int, text: Sequence[int], num_mixes: int, ctx_size: int) -> list[list[Call]]:
    """Return mixes of up to MAX_SEQS sequences, of any length that fits in a context.

    text: tokens, of which prompts are parts; some begin as an earlier one did.
    """
    random = np.random.default_rng(seed)
    earlier: list[tuple[int, ...]] = []
    return [
        [_call(random, text, ctx_size, earlier) for _ in range(random.integers(1, 1 + MAX_SEQS))]
        for _ in range(num_mixes)
    ]


def _call(
    random: np.random.Generator, text: Sequence[int], ctx_size: int, earlier: list[tuple[int, ...]]
) -> Call:
    num_new = int(random.integers(4, MAX_NEW_TOKENS + 1))
    length = int(np.exp(random.uniform(np.log(16), np.log(ctx_size - num_new))))
    shared: tuple[int, ...] = ()
    if earlier and random.random() < _P_SHARED:
        shared = earlier[random.integers(len(earlier))]
        shared = shared[: random.integers(1, len(shared) + 1)][: length - 1]
    start = int(random.integers(len(text) - length))
    prompt = (*shared, *text[start : start + length - len(shared)])
    earlier.append(prompt)
    sampling: dict[str, Any] = {"max_tokens": num_new, "ignore_eos": True, "logprobs": True}
    if random.random() < _P_SAMPLED:
        sampling |= {"temperature": 0.7, "seed": int(random.integers(1000))}
    is_cancelled = random.random() < _P_CANCELLED
    cancelled_after = int(random.integers(num_new)) if is_cancelled else None
    delay = float(random.exponential(_MEAN_DELAY))
    return Call(prompt, sampling, int(random.integers(len(DRAFTING))), delay, cancelled_after)
