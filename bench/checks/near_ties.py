"""Check whether a difference between two greedy decodings is only a near tie.

For targets that are not batch-invariant (--exact off, and GPUs): sums over one token and over many
may have different orders, so a token's logits depend a little on the other tokens of its pass. If
the best two tokens are closer than that drift, either may win, with or without a draft. This
measures gap and drift at the first difference of a pair of decodings. An exact target has no
drift: there every difference is an error (bench/checks/equal_outputs.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.contract.backend import PREFIX, Backend

BATCH_SIZES = (1, 8, 64)


@dataclass(frozen=True)
class NearTie:
    """First difference of two decodings, at token `position` of the output."""

    position: int
    tokens: tuple[int, int]
    gap: float
    """Distance of the two tokens' logits in a pass of one token."""
    drift: float
    """Largest difference of any logit between passes that differ in their other tokens only."""

    @property
    def is_explained(self) -> bool:
        return self.gap <= self.drift

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "explained": self.is_explained}


def examine(
    target: Backend, prompt_ids: Sequence[int], left: Sequence[int], right: Sequence[int]
) -> NearTie | None:
    """Return the first difference of two continuations; None when there is none.

    Runs the sequence up to the difference in passes of 1, 8 and 64 tokens, or as many as the
    target's KV cache has slots for, and once as a prompt.
    """
    position = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)
    if position is None:
        return None
    prefix = [*prompt_ids, *left[:position]]
    rows = _rows(target, prefix)
    tokens = (left[position], right[position])
    gap = abs(float(rows[0][tokens[0]] - rows[0][tokens[1]]))
    drift = max(float(np.abs(a - b).max()) for a, b in combinations(rows, 2))
    return NearTie(position, tokens, gap, drift)


def _rows(target: Backend, prefix: Sequence[int]) -> list[NDArray[np.float32]]:
    """Return logits after `prefix` from passes of different sizes, of one token first."""
    kv = target.new_sequence()
    as_prompt = kv.prefill(prefix)
    kv.rollback(len(prefix) - 1)
    rows = []
    for num_tokens in sorted({min(n, kv.num_free_slots) for n in BATCH_SIZES}):
        fillers = [prefix[i % len(prefix)] for i in range(num_tokens - 1)]
        ids, logits = kv.extend([prefix[-1], *fillers], [PREFIX] * num_tokens, logits_at=[0])
        kv.prune(ids)
        rows.append(logits[0])
    kv.close()
    return [*rows, as_prompt]
