"""What sequences get in a pass, as the rows of llama.cpp's batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from backends.contract.store import NewTokens
from backends.llama.batch import Batch
from backends.llama.cache import CellStore


class PassRows:
    """The new rows of all sequences, one text after the other."""

    def __init__(self, new: Sequence[NewTokens[CellStore]]) -> None:
        self.token_ids = [token for item in new for token in item.token_ids]
        self.sequences = [item.store for item in new for _ in item.token_ids]
        self.positions = [position for item in new for position in _positions(item).tolist()]
        self._sequences = [names for item in new for names in _sequences(item)]
        ends = np.cumsum([len(item.token_ids) for item in new])
        starts = [0, *ends[:-1].tolist()]
        self._rows_of_sequences = [
            start + np.array(item.logits_at, dtype=np.int64)
            for start, item in zip(starts, new, strict=True)
        ]
        self._requested = np.unique(np.concatenate(self._rows_of_sequences))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def n_outputs(self) -> int:
        """Rows whose logits are wanted."""
        return len(self._requested)

    def batches(
        self, max_num_tokens: int, min_count: int, scratch: int
    ) -> Iterator[tuple[slice, Batch]]:
        """Batches of so many rows at most, and which of the rows each has."""
        for start in range(0, len(self), max_num_tokens):
            part = slice(start, start + max_num_tokens)
            requested = (
                self._requested[(self._requested >= start) & (self._requested < part.stop)] - start
            )
            yield (
                part,
                Batch(
                    self.token_ids[part],
                    self.positions[part],
                    self._sequences[part],
                    requested,
                    min_count,
                    scratch,
                ),
            )

    def of_sequences(self, logits: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The wanted rows of each text, from those of the batches, each of which has a row once."""
        result = logits[0] if len(logits) == 1 else np.concatenate(logits)
        places = [np.searchsorted(self._requested, rows) for rows in self._rows_of_sequences]
        if len(places) == 1 and np.array_equal(places[0], np.arange(len(result))):
            return [result]  # as usual: no copy
        return [result[rows] for rows in places]


def _positions(new: NewTokens[CellStore]) -> np.ndarray:
    table = new.store.table
    if new.are_nodes:
        return table.positions(new.n_live_before)
    return table.n_committed + np.arange(len(new.token_ids))


def _sequences(new: NewTokens[CellStore]) -> Sequence[list[int]]:
    return new.store.new if new.are_nodes else [new.store.in_use] * len(new.token_ids)
