"""TopK: the likeliest next tokens of many positions, with the probability of all others."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MIN_LOGPROB = -60_000.0
"""Smallest log-probability that is stored: float16 ends at -65504."""


class TopK(NamedTuple):
    """The k likeliest tokens of m positions, likeliest first; ties in order of ids."""

    ids: NDArray[np.int32]
    """[m, k]"""
    logprobs: NDArray[np.float16]
    """[m, k]"""
    rest: NDArray[np.float16]
    """[m]: log of the probability of all other tokens."""

    @classmethod
    def of(cls, logits: NDArray[np.float32], k: int) -> TopK:
        """Return the k likeliest tokens of logits [m, vocab]; k is at most vocab."""
        logits = np.asarray(logits, dtype=np.float32)
        ids = np.stack([_likeliest(row, k) for row in logits])
        top = logits.max(axis=1, keepdims=True)
        exponentials = np.exp(logits - top)
        log_total = np.log(exponentials.sum(axis=1, dtype=np.float64))
        logprobs = np.take_along_axis(logits, ids, axis=1) - top - log_total[:, None]
        np.put_along_axis(exponentials, ids, 0.0, axis=1)  # added up: 1 - sum would cancel
        with np.errstate(divide="ignore"):
            rest = np.log(exponentials.sum(axis=1, dtype=np.float64)) - log_total
        return cls(ids.astype(np.int32), _stored(logprobs), _stored(rest))

    @classmethod
    def joined(cls, parts: list[TopK], k: int) -> TopK:
        """Return the positions of all parts, in order."""
        if not parts:
            empty = np.zeros((0, k))
            return cls(empty.astype(np.int32), _stored(empty), _stored(empty[:, 0]))
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def part(self, rows: slice) -> TopK:
        """Return the positions `rows`."""
        return TopK(self.ids[rows], self.logprobs[rows], self.rest[rows])

    @property
    def n_bytes(self) -> int:
        return self.ids.nbytes + self.logprobs.nbytes + self.rest.nbytes


def _likeliest(row: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    threshold = np.partition(row, len(row) - k)[len(row) - k]
    candidates = np.flatnonzero(row >= threshold)
    return candidates[np.argsort(-row[candidates], kind="stable")][:k]


def _stored(logprobs: NDArray[np.floating]) -> NDArray[np.float16]:
    return np.maximum(logprobs, MIN_LOGPROB).astype(np.float16)
