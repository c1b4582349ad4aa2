"""What the tokens after a draft's nodes are ranked by.

`specdec` says it, as data; a backend that has its logits on a device ranks them there, and what
comes to the host is a few numbers of each row. The formula is the drafter's
(specdec/drafters/candidates.py):

    chance(token) = softmax((logits + noise) / sharpness)

Tokens that the filters rule out have none. Of tokens with equal scores it is open which are among
the likeliest and which of them comes first, here as in numpy's partition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from backends.contract.rows import LogitRows

MAX_NOISE_POSITIONS = 32
"""Positions whose noise is kept, [n_tokens] each: a tree needs it again at every level."""
HEAD_TOKENS = 512
"""Likeliest tokens that a filter looks at; a larger nucleus is left whole."""
RANKED_TOGETHER = MAX_NOISE_POSITIONS
"""Rows that a device ranks at a time, each with the noise of a position of its own."""
_SCORE_BYTES = 4 + 4 + 1
"""A score in float32; its noise, or what a filter makes of it; whether a filter rules it out."""
_FOUND_BYTES = 2 * (4 + 8)
"""A score and a token, before and after they are put together."""
_HEAD_BYTES = 64
"""Of a token of the head: scores, ids, and sums in float64, with copies."""
_KERNEL_BYTES = 8 << 20
"""What a GPU's search for the largest counts in: assumed, some thousand numbers for each row."""


@dataclass(frozen=True)
class TokenFilters:
    """Tokens that the target's request rules out, looked for before the noise is added."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True)
class Ranking:
    """See above."""

    n_tokens: int
    """Of a row; the rest is padding."""
    sharpness: float = 1.0
    noise: Callable[[int], NDArray[np.float32]] | None = None
    """Of a position in the text, [n_tokens]."""
    filters: TokenFilters | None = None


class Ranked(NamedTuple):
    """The likeliest tokens after each of n rows, the likeliest first."""

    token_ids: NDArray[np.int64]  # [n, width]
    log_chances: NDArray[np.float64]  # [n, width]; -inf or NaN for what is ruled out


class RowRanker(Protocol):
    """Ranks rows where they are. For one thread at a time."""

    def rank(self, rows: LogitRows, positions: Sequence[int], width: int) -> Ranked:
        """At most `width` tokens for each row of logits [n, vocab], of this backend or an array.

        positions [n]: where in the text the tokens would stand.

        Raises BudgetExceeded where the device's memory does not suffice.
        """

    def forget(self) -> None:
        """Give back what is kept from one call to the next."""


def log_chances(
    scores: NDArray[np.float32], sums: NDArray[np.float32] | NDArray[np.float64]
) -> NDArray[np.float64]:
    """Of the likeliest tokens, whose scores [n, width] are in any order.

    sums [n, 1]: of exp(score - largest score) over the whole row.
    """
    peaks = scores.max(axis=1, keepdims=True)
    return np.asarray(scores.astype(np.float64) - peaks - np.log(sums, dtype=np.float64))


def ranking_bytes(n_rows: int, n_tokens: int, width: int) -> int:
    """Memory of a device that ranking so many rows takes, beside the logits, at most."""
    together = min(n_rows, RANKED_TOGETHER)
    scores = together * (n_tokens * _SCORE_BYTES + min(n_tokens, HEAD_TOKENS) * _HEAD_BYTES)
    noise = MAX_NOISE_POSITIONS * n_tokens * 4
    return scores + noise + n_rows * width * _FOUND_BYTES + _KERNEL_BYTES
