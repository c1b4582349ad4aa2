"""The batch of one llama.cpp pass, in numpy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np


class Batch:
    """Rows of one pass.

    Args:
        token_ids: [n]
        positions: [n] in the sequence
        sequences: for each row the sequences that it belongs to, at least one; the first one's
            cells (up to the row's position) are what the row attends to.
        rows: those whose logits are wanted.
        n_least: rows, and rows of logits where there are any, that the pass is filled up to.
        spare: an empty sequence for rows that fill it up, to be emptied after the pass.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int] | np.ndarray,
        sequences: Sequence[Sequence[int]],
        rows: Sequence[int] | np.ndarray,
        min_count: int = 1,
        scratch: int = 0,
    ) -> None:
        self.n_fillers = max(0, min_count - len(token_ids))
        self.n_tokens = len(token_ids) + self.n_fillers
        outputs = _outputs(rows, self.n_tokens, min_count)
        self.n_outputs = len(outputs)
        self.requested = np.flatnonzero(np.isin(outputs, rows))
        """Which rows of logits are those of `rows`, in the batch's order."""
        fillers = np.arange(self.n_fillers)
        self._tokens = np.concatenate([token_ids, 0 * fillers]).astype(np.int32)
        self._positions = np.concatenate([positions, fillers]).astype(np.int32)
        named = [*sequences, *[[scratch]] * self.n_fillers]
        self._counts = np.asarray([len(names) for names in named], dtype=np.int32)
        self._names = np.concatenate([np.asarray(names, dtype=np.int32) for names in named])
        starts = np.cumsum(self._counts, dtype=np.uint64) - self._counts.astype(np.uint64)
        self._pointers = self._names.ctypes.data + starts * np.uint64(self._names.itemsize)
        self._pointers = self._pointers.astype(np.uint64)
        self._outputs = np.zeros(self.n_tokens, dtype=np.int8)
        self._outputs[outputs] = 1

    def first_filler(self, num_tokens: int) -> int:
        """n_rows: of all rows, or of those with logits, which alone are in the last layer. The rows
        that fill the pass up are the last of them."""
        outputs = self._outputs[self.n_tokens - self.n_fillers :]
        return num_tokens - (self.n_fillers if num_tokens == self.n_tokens else int(outputs.sum()))

    @property
    def token_ids(self) -> list[int]:
        """Of all rows, those that fill the pass up among them."""
        return self._tokens.tolist()

    def as_struct(self, library: ModuleType) -> Any:
        """A `llama_batch` that points into this object's arrays."""
        types = dict(library.llama_batch._fields_)
        batch = library.llama_batch()
        batch.n_tokens = self.n_tokens
        for field, array in (
            ("token", self._tokens),
            ("pos", self._positions),
            ("n_seq_id", self._counts),
            ("seq_id", self._pointers),
            ("logits", self._outputs),
        ):
            setattr(batch, field, ctypes.cast(array.ctypes.data, types[field]))
        return batch


def _outputs(rows: Sequence[int] | np.ndarray, n_tokens: int, min_count: int) -> np.ndarray:
    """Rows of a pass that get logits, ascending: the wanted ones, and the last others."""
    requested = np.unique(np.asarray(rows, dtype=np.int64))
    n_more = min_count - len(requested) if len(requested) else 0
    rest = np.setdiff1d(np.arange(n_tokens), requested)
    return np.sort(np.concatenate([requested, rest[len(rest) - max(n_more, 0) :]]))
