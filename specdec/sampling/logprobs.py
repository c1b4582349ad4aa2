"""Log-probabilities for the caller: the model's own, before any processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TopLogprobs = dict[int, float]
"""Mapping {token id: log p} of the likeliest tokens at one position, likeliest first."""


class RankedLogprob(NamedTuple):
    """Log-probability of a token, and its rank among all tokens: 1 is the likeliest."""

    logprob: float
    rank: int


PromptLogprobs = tuple[dict[int, RankedLogprob] | None, ...]
"""Entries of a prompt's tokens as vLLM has them: {token id: ...} of the likeliest tokens at the
position, likeliest first, and of the prompt's own. None for the first token."""


def log_probs_of(row: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the log-probabilities, float64 [n], of a row of logits [n]."""
    shifted = row.astype(np.float64) - row.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def top_logprobs(log_probs: NDArray[np.float64], k: int) -> TopLogprobs:
    """Return the k likeliest tokens of log_probs [n]; ties in order of ids."""
    if k == 0:
        return {}
    k = min(k, len(log_probs))
    threshold = np.partition(log_probs, len(log_probs) - k)[len(log_probs) - k]
    candidates = np.flatnonzero(log_probs >= threshold)
    best = candidates[np.argsort(-log_probs[candidates], kind="stable")][:k]
    return {int(token): float(log_probs[token]) for token in best}


def logprobs_of_token(row: NDArray[np.float32], token: int, k: int) -> tuple[float, TopLogprobs]:
    """Return log p of a token by a row of logits [n], and with k > 0 the k likeliest and the token.

    The token is last if it is not among the likeliest.
    """
    log_p = log_probs_of(row)
    logprob = float(log_p[token])
    top = top_logprobs(log_p, k)
    return logprob, {**top, token: logprob} if k else top


class PromptScorer:
    """Log-probabilities of one prompt's tokens, in whatever chunks it is computed.

    Args:
        k: number of likeliest tokens beside the prompt's own at each position.
        num_tokens: number of tokens that both the tokenizer and the model have.
    """

    def __init__(self, prompt_ids: Sequence[int], k: int, num_tokens: int) -> None:
        self._prompt_ids, self._k, self._num_tokens = prompt_ids, k, num_tokens
        self._entries: dict[int, dict[int, RankedLogprob]] = {}

    def missing(self, start: int, end: int) -> list[int]:
        """Return the positions from `start` to `end` whose logits are still needed: those before
        another token of the prompt."""
        end = min(end, len(self._prompt_ids) - 1)
        return [position for position in range(start, end) if position + 1 not in self._entries]

    def score(self, position: int, row: NDArray[np.float32]) -> None:
        """Take the logits [vocab] of a position, which are of the token after it."""
        token, log_p = self._prompt_ids[position + 1], log_probs_of(row[: self._num_tokens])
        ranked = {
            other: RankedLogprob(logprob, rank)
            for rank, (other, logprob) in enumerate(top_logprobs(log_p, self._k).items(), 1)
        }
        if token not in ranked:
            own = log_p[token]
            rank = 1 + int((log_p > own).sum() + (log_p[:token] == own).sum())
            ranked[token] = RankedLogprob(float(own), rank)
        self._entries[position + 1] = ranked

    @property
    def is_complete(self) -> bool:
        return len(self._entries) == len(self._prompt_ids) - 1

    @property
    def result(self) -> PromptLogprobs | None:
        """The entries of all tokens; None until the prompt is computed."""
        if not self.is_complete:
            return None
        return (None, *(self._entries[i] for i in range(1, len(self._prompt_ids))))
