"""Several sequences in one forward pass, each with its own layout and blocks in the KV cache.

The new rows of the sequences are concatenated. So are, for the masks, their keys:

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
    """One sequence's part of a forward pass.

    table int64 [blocks]: block table: the cache block of each of its blocks, in order.
    """

    layout: PassLayout
    table: np.ndarray

    def n_keys(self, end: int) -> int:
        """Number of keys once the first `end` new rows are cached."""
        return self.layout.n_keys(end)


@dataclass(frozen=True)
class PartRows:
    """New rows of one sequence among those start..end of a forward.

    first_row: index of its first row, counted from `start` of the forward.
    first_key: index of the sequence's first key among the keys of all sequences.
    """

    part: SequencePart
    start: int
    end: int
    first_row: int
    first_key: int


@dataclass(frozen=True)
class BatchLayout:
    """Layout of one forward pass over several sequences: which keys each row sees."""

    parts: tuple[SequencePart, ...]

    @classmethod
    def of(cls, layout: PassLayout) -> BatchLayout:
        """Create the batch of a single sequence that has the whole cache."""
        num_tokens = layout.prefix + layout.first_new + layout.n_new
        return cls((SequencePart(layout, np.arange(-(-num_tokens // BLOCK_SIZE))),))

    @cached_property
    def n_new(self) -> int:
        return sum(part.layout.n_new for part in self.parts)

    @property
    def new_positions(self) -> np.ndarray:
        return np.concatenate([part.layout.new_positions for part in self.parts])

    def rows(self, start: int, end: int) -> Iterator[PartRows]:
        """Yield each sequence's share of the new rows start..end, which are all cached."""
        first_row = first_key = 0
        for part in self.parts:
            a, b = (min(max(0, at - first_row), part.layout.n_new) for at in (start, end))
            if a < b:
                yield PartRows(part, a, b, max(first_row, start) - start, first_key)
            first_row += part.layout.n_new
            first_key += part.n_keys(b)

    def n_keys(self, end: int) -> int:
        """Number of keys once `end` new rows are cached."""
        return sum(part.n_keys(n) for part, n in self.cached(end))

    def key_positions(self, end: int) -> np.ndarray:
        """Positions of the keys that exist once `end` new rows are cached, [keys]."""
        return np.concatenate([part.layout.key_positions(n) for part, n in self.cached(end)])

    def allowed(self, start: int, end: int, window: int | None) -> np.ndarray:
        """Return bool [end - start, keys]: whether a new row start..end sees a key."""
        allowed = np.zeros((end - start, self.n_keys(end)), dtype=bool)
        for share in self.rows(start, end):
            own = share.part.layout.allowed(share.start, share.end, window)
            rows = slice(share.first_row, share.first_row + len(own))
            allowed[rows, share.first_key : share.first_key + own.shape[1]] = own
        return allowed

    def looking_ahead(self) -> BatchLayout:
        """Return the layout in which the new nodes of a sequence see one another."""
        parts = (replace(part, layout=part.layout.looking_ahead()) for part in self.parts)
        return BatchLayout(tuple(parts))

    def padded(self, n_more: int) -> BatchLayout:
        """Return the layout with `n_more` copies of the last row, which no other row sees."""
        *remaining, last = self.parts
        return BatchLayout((*remaining, replace(last, layout=last.layout.padded(n_more))))

    def cached(self, end: int) -> Iterator[tuple[SequencePart, int]]:
        """Yield each sequence and how many of the first `end` new rows are its own."""
        first = 0
        for part in self.parts:
            yield part, min(max(0, end - first), part.layout.n_new)
            first += part.layout.n_new


def rows_in_pool(table: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the cache rows of these rows of a sequence, int64 [rows]."""
    cache_rows: np.ndarray = table[rows // BLOCK_SIZE] * BLOCK_SIZE + rows % BLOCK_SIZE
    return cache_rows


def runs_of(rows: np.ndarray) -> list[tuple[int, int, int]]:
    """Return (index in `rows`, first row, count) of each run of consecutive rows."""
    if not len(rows):
        return []
    starts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    return [(a, int(rows[a]), b - a) for a, b in zip(starts[:-1], starts[1:], strict=True)]
