"""What texts get in a pass, as the rows of llama.cpp's batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from backends.contract.store import NewTokens
from backends.llama.batch import Batch
from backends.llama.cache import CellStore


class PassRows:
    """The new rows of all texts, one text after the other."""

    def __init__(self, new: Sequence[NewTokens[CellStore]]) -> None:
        self.token_ids = [token for one in new for token in one.token_ids]
        self.texts = [one.store for one in new for _ in one.token_ids]
        self.positions = [position for one in new for position in _positions(one).tolist()]
        self._sequences = [names for one in new for names in _sequences(one)]
        ends = np.cumsum([len(one.token_ids) for one in new])
        starts = [0, *ends[:-1].tolist()]
        self._rows_of_texts = [
            start + np.array(one.logits_at, dtype=np.int64)
            for start, one in zip(starts, new, strict=True)
        ]
        self._wanted = np.unique(np.concatenate(self._rows_of_texts))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def n_outputs(self) -> int:
        """Rows whose logits are wanted."""
        return len(self._wanted)

    def batches(self, max_rows: int, n_least: int, spare: int) -> Iterator[tuple[slice, Batch]]:
        """Batches of so many rows at most, and which of the rows each has."""
        for start in range(0, len(self), max_rows):
            part = slice(start, start + max_rows)
            wanted = self._wanted[(self._wanted >= start) & (self._wanted < part.stop)] - start
            yield (
                part,
                Batch(
                    self.token_ids[part],
                    self.positions[part],
                    self._sequences[part],
                    wanted,
                    n_least,
                    spare,
                ),
            )

    def of_texts(self, logits: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The wanted rows of each text, from those of the batches, each of which has a row once."""
        found = logits[0] if len(logits) == 1 else np.concatenate(logits)
        places = [np.searchsorted(self._wanted, rows) for rows in self._rows_of_texts]
        if len(places) == 1 and np.array_equal(places[0], np.arange(len(found))):
            return [found]  # as usual: no copy
        return [found[rows] for rows in places]


def _positions(new: NewTokens[CellStore]) -> np.ndarray:
    table = new.store.table
    if new.are_nodes:
        return table.positions(new.n_live_before)
    return table.n_committed + np.arange(len(new.token_ids))


def _sequences(new: NewTokens[CellStore]) -> Sequence[list[int]]:
    return new.store.new if new.are_nodes else [new.store.in_use] * len(new.token_ids)
