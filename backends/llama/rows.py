"""PassRows: the new tokens of all sequences in a pass, as llama.cpp's batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from backends.contract.store import NewTokens
from backends.llama.batch import Batch
from backends.llama.cache import CellStore


class PassRows:
    """The new tokens of all sequences, one sequence after the other."""

    def __init__(self, new: Sequence[NewTokens[CellStore]]) -> None:
        self.token_ids = [token for tokens in new for token in tokens.token_ids]
        self.sequences = [tokens.store for tokens in new for _ in tokens.token_ids]
        self.positions = [p for tokens in new for p in _positions(tokens).tolist()]
        self._sequences = [names for tokens in new for names in _sequences(tokens)]
        ends = np.cumsum([len(tokens.token_ids) for tokens in new])
        starts = [0, *ends[:-1].tolist()]
        self._rows_of_sequences = [
            start + np.array(tokens.logits_at, dtype=np.int64)
            for start, tokens in zip(starts, new, strict=True)
        ]
        self._requested = np.unique(np.concatenate(self._rows_of_sequences))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def n_outputs(self) -> int:
        """Number of rows of logits to return."""
        return len(self._requested)

    def batches(
        self, max_num_tokens: int, min_count: int, scratch: int
    ) -> Iterator[tuple[slice, Batch]]:
        """Yield batches of at most `max_num_tokens`, and which of the tokens each has."""
        for start in range(0, len(self), max_num_tokens):
            part = slice(start, start + max_num_tokens)
            rows = self._requested
            rows = rows[(rows >= start) & (rows < part.stop)] - start
            tokens, positions = self.token_ids[part], self.positions[part]
            names = self._sequences[part]
            yield part, Batch(tokens, positions, names, rows, min_count, scratch)

    def of_sequences(self, logits: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return each sequence's logits, from those of the batches, which have each row once."""
        all_logits = logits[0] if len(logits) == 1 else np.concatenate(logits)
        places = [np.searchsorted(self._requested, rows) for rows in self._rows_of_sequences]
        if len(places) == 1 and np.array_equal(places[0], np.arange(len(all_logits))):
            return [all_logits]  # the usual case: no copy
        return [all_logits[rows] for rows in places]


def _positions(new: NewTokens[CellStore]) -> np.ndarray:
    table = new.store.table
    if new.are_nodes:
        return table.positions(new.n_live_before)
    return table.n_committed + np.arange(len(new.token_ids))


def _sequences(new: NewTokens[CellStore]) -> Sequence[list[int]]:
    return new.store.new if new.are_nodes else [new.store.in_use] * len(new.token_ids)
