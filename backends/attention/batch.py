"""Several sequences in one forward: each has a layout and blocks of its own in the KV cache.

The new rows of the sequences follow each other. So do, as far as masks are concerned, their keys:

    rows   [ new rows of a | new rows of b ]
    keys   [ prefix of a, nodes of a | prefix of b, nodes of b ]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from backends.attention.layout import PassLayout

BLOCK_SIZE = 64
"""Rows of a block of the KV cache, and keys of a block of exact attention (blocks.py)."""


@dataclass(frozen=True)
class SequencePart:
    """What one sequence has in a forward.

    table int64 [blocks]: where in the cache the blocks of its rows lie, in order.
    """

    layout: PassLayout
    table: np.ndarray

    def n_keys(self, end: int) -> int:
        """Rows that are there once `end` of its new ones are."""
        return self.layout.prefix + self.layout.first_new + end


@dataclass(frozen=True)
class PartRows:
    """New rows of one sequence among those start..end of a forward.

    first_row: of them, counted from `start`.
    first_key: of the sequence, among the keys of all.
    """

    part: SequencePart
    start: int
    end: int
    first_row: int
    first_key: int


@dataclass(frozen=True)
class BatchLayout:
    """Who sees whom in one forward of several sequences."""

    parts: tuple[SequencePart, ...]

    @classmethod
    def of(cls, layout: PassLayout) -> BatchLayout:
        """Of one sequence that has a cache to itself."""
        num_tokens = layout.prefix + layout.first_new + layout.n_new
        return cls((SequencePart(layout, np.arange(-(-num_tokens // BLOCK_SIZE))),))

    @cached_property
    def n_new(self) -> int:
        return sum(part.layout.n_new for part in self.parts)

    @property
    def new_positions(self) -> np.ndarray:
        return np.concatenate([part.layout.new_positions for part in self.parts])

    def rows(self, start: int, end: int) -> Iterator[PartRows]:
        """What the sequences have of the new rows start..end, all of which are in their caches."""
        first_row = first_key = 0
        for part in self.parts:
            a, b = (min(max(0, at - first_row), part.layout.n_new) for at in (start, end))
            if a < b:
                yield PartRows(part, a, b, max(first_row, start) - start, first_key)
            first_row += part.layout.n_new
            first_key += part.n_keys(b)

    def n_keys(self, end: int) -> int:
        """Keys that exist once `end` new rows are cached."""
        return sum(part.n_keys(n) for part, n in self.cached(end))

    def key_positions(self, end: int) -> np.ndarray:
        """Positions of the keys that exist once `end` new rows are cached, [keys]."""
        return np.concatenate([part.layout.key_positions(n) for part, n in self.cached(end)])

    def allowed(self, start: int, end: int, window: int | None) -> np.ndarray:
        """Bool [end - start, keys]: what the new rows start..end may look at."""
        result = np.zeros((end - start, self.n_keys(end)), dtype=bool)
        for of in self.rows(start, end):
            own = of.part.layout.allowed(of.start, of.end, window)
            rows = slice(of.first_row, of.first_row + len(own))
            result[rows, of.first_key : of.first_key + own.shape[1]] = own
        return result

    def padded(self, n_more: int) -> BatchLayout:
        """With so many more rows behind, each as the last one is, whom no other row sees."""
        *rest, last = self.parts
        return BatchLayout((*rest, replace(last, layout=last.layout.padded(n_more))))

    def cached(self, end: int) -> Iterator[tuple[SequencePart, int]]:
        """Each sequence with how many of its new rows are among the first `end` of all."""
        first = 0
        for part in self.parts:
            yield part, min(max(0, end - first), part.layout.n_new)
            first += part.layout.n_new


def rows_in_pool(table: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Where in the cache these rows of a sequence lie, int64 [rows]."""
    result: np.ndarray = table[rows // BLOCK_SIZE] * BLOCK_SIZE + rows % BLOCK_SIZE
    return result


def runs_of(rows: np.ndarray) -> list[tuple[int, int, int]]:
    """(place among the rows, first of them, how many) of rows that follow each other."""
    if not len(rows):
        return []
    starts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    return [(a, int(rows[a]), b - a) for a, b in zip(starts[:-1], starts[1:], strict=True)]
