"""Batch: the tokens of one llama.cpp pass, in numpy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np


class Batch:
    """Tokens of one pass.

    Args:
        token_ids: [n]
        positions: [n] in the sequence
        sequences: llama.cpp sequences of each token, at least one; it attends to the first one's
            cells, up to its own position.
        rows: indices of the tokens to return logits of.
        min_count: tokens (and rows of logits, if there are any) that the pass is padded to.
        scratch: a sequence for the padding tokens, to be removed from it after the pass.
        scratch_start: the position of the first padding token in it.
        state_rows: indices of the tokens to return hidden states of.
        hidden_states: float32 [n, width]: the target's, for a draft head; None for other models.
        rollback_start: a sequence and its tokens before the pass, whose recurrent states may be
            rolled back to a token of it; None: to none.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int] | np.ndarray,
        sequences: Sequence[Sequence[int]],
        rows: Sequence[int] | np.ndarray,
        min_count: int = 1,
        scratch: int = 0,
        scratch_start: int = 0,
        state_rows: Sequence[int] | np.ndarray = (),
        hidden_states: np.ndarray | None = None,
        rollback_start: tuple[int, int] | None = None,
    ) -> None:
        self.n_fillers = max(0, min_count - len(token_ids))
        self.n_tokens = len(token_ids) + self.n_fillers
        outputs = _outputs(rows, self.n_tokens, min_count)
        self.n_outputs = len(outputs)
        self.requested = np.flatnonzero(np.isin(outputs, rows))
        """Indices of the logits of `rows` among all rows of logits, in batch order."""
        fillers = np.arange(self.n_fillers)
        self._tokens = np.concatenate([token_ids, 0 * fillers]).astype(np.int32)
        self._positions = np.concatenate([positions, scratch_start + fillers]).astype(np.int32)
        named = [*sequences, *[[scratch]] * self.n_fillers]
        self._counts = np.asarray([len(names) for names in named], dtype=np.int32)
        self._names = np.concatenate([np.asarray(names, dtype=np.int32) for names in named])
        starts = np.cumsum(self._counts, dtype=np.uint64) - self._counts.astype(np.uint64)
        self._pointers = self._names.ctypes.data + starts * np.uint64(self._names.itemsize)
        self._pointers = self._pointers.astype(np.uint64)
        self._outputs = np.zeros(self.n_tokens, dtype=np.int8)
        self._outputs[outputs] = 1
        self.state_rows = np.asarray(state_rows, dtype=np.int64)
        self.rollback_start, self._hidden_states = rollback_start, hidden_states
        if hidden_states is not None:
            padding = ((0, self.n_fillers), (0, 0))
            self._hidden_states = np.pad(hidden_states.astype(np.float32), padding)

    def first_filler(self, num_tokens: int) -> int:
        """Return the index of the first padding token; they come last.

        num_tokens: of all tokens, or (in the last layer) of those with logits.
        """
        outputs = self._outputs[self.n_tokens - self.n_fillers :]
        return num_tokens - (self.n_fillers if num_tokens == self.n_tokens else int(outputs.sum()))

    def outputs_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the places of tokens among those with logits. Raises ValueError for others."""
        outputs = np.flatnonzero(self._outputs)
        if not np.isin(rows, outputs).all():
            raise ValueError("hidden states of tokens without logits are asked for")
        return np.searchsorted(outputs, rows)

    @property
    def has_hidden_states(self) -> bool:
        return self._hidden_states is not None

    @property
    def token_ids(self) -> list[int]:
        """Ids of all tokens, padding included."""
        return self._tokens.tolist()

    def as_struct(self, library: ModuleType) -> Any:
        """Return a `llama_batch` that points into this object's arrays."""
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
        if self._hidden_states is not None:
            batch.embd = ctypes.cast(self._hidden_states.ctypes.data, types["embd"])
        return batch


def _outputs(rows: Sequence[int] | np.ndarray, n_tokens: int, min_count: int) -> np.ndarray:
    """Return the tokens that get logits, ascending: the requested ones, padded with others."""
    requested = np.unique(np.asarray(rows, dtype=np.int64))
    n_more = min_count - len(requested) if len(requested) else 0
    remaining = np.setdiff1d(np.arange(n_tokens), requested)
    return np.sort(np.concatenate([requested, remaining[len(remaining) - max(n_more, 0) :]]))
