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
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int] | np.ndarray,
        sequences: Sequence[Sequence[int]],
        rows: Sequence[int],
    ) -> None:
        self.n_tokens = len(token_ids)
        self.n_outputs = len(set(rows))
        self._tokens = np.asarray(token_ids, dtype=np.int32)
        self._positions = np.asarray(positions, dtype=np.int32)
        self._counts = np.asarray([len(names) for names in sequences], dtype=np.int32)
        self._names = np.concatenate([np.asarray(names, dtype=np.int32) for names in sequences])
        starts = np.cumsum(self._counts, dtype=np.uint64) - self._counts.astype(np.uint64)
        self._pointers = self._names.ctypes.data + starts * np.uint64(self._names.itemsize)
        self._pointers = self._pointers.astype(np.uint64)
        self._outputs = np.zeros(self.n_tokens, dtype=np.int8)
        self._outputs[list(rows)] = 1

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
