"""Log-probabilities for the caller: the model's own, before any processor."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TopLogprobs = dict[int, float]
"""Mapping {token id: log p} of the likeliest tokens at one position, likeliest first."""


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
