"""Rows of a pass that see keys of one sequence, and those keys as columns of scores, in blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from backends.attention.batch import BLOCK_SIZE
from backends.attention.stored_rows import StoredRows
from offload.units import MIB

BLOCK_KEYS = BLOCK_SIZE
SPAN_BYTES = 8 * MIB
"""Size of the float32 keys and values in memory together. One row over 32 000 keys of 8 heads
of 128 numbers takes 35 ms per layer with 1 MiB, 18 with 4, 13 with 8 and 16."""


@dataclass(frozen=True)
class RowGroup:
    """Rows start..end of a pass, and the keys that any of them sees, as columns of scores.

    The keys are of one sequence. Keys that all rows see come first, in cache order; then single
    keys, along every path in the order of positions.

    runs: (first column, first row of the cache, count) of the first columns.
    picked int64 [columns]: rows of the cache for the columns after them.
    widths: columns of each block, multiples of BLOCK_KEYS; columns beyond its keys are hidden.
    keys int64 [columns]: the key of the pass in each column; any key for hidden columns.
    hidden bool [rows, columns]: which of the last columns a row does not see.
    edge_hidden bool [rows, edge]: the same for the first columns, if a window ends there.
    """

    start: int
    end: int
    runs: tuple[tuple[int, int, int], ...]
    picked: torch.Tensor | None
    widths: tuple[int, ...]
    keys: torch.Tensor
    hidden: torch.Tensor
    edge_hidden: torch.Tensor | None

    @property
    def n_columns(self) -> int:
        return sum(self.widths)

    @property
    def nbytes(self) -> int:
        tensors = (self.picked, self.keys, self.hidden, self.edge_hidden)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def fill(self, columns: torch.Tensor, rows: StoredRows, first: int = 0) -> None:
        """Copy rows of the cache, [1, heads, rows, dim], to columns [heads, columns, dim], which
        begin with the group's column `first`.

        Hidden columns without a key are set to zero.
        """
        end, of_runs = first + columns.shape[1], 0
        for start, row, num_tokens in self.runs:
            of_runs = start + num_tokens
            a, b = max(start, first), min(of_runs, end)
            if a < b:
                rows.read(
                    slice(row + a - start, row + b - start), columns[:, a - first : b - first]
                )
        start = max(of_runs, first)
        if start >= end:
            return
        if self.picked is None:
            columns[:, start - first :] = 0.0
        else:
            picked = self.picked[start - of_runs : end - of_runs]
            rows.pick(picked, columns[:, start - first :])


class BlockSpan(NamedTuple):
    """Consecutive blocks: columns first..end of a group, and the columns of each block."""

    first: int
    end: int
    widths: tuple[int, ...]


@lru_cache(maxsize=8)
def spans_of(widths: tuple[int, ...], bytes_per_column: int) -> list[BlockSpan]:
    """Return spans of as many blocks as fit in SPAN_BYTES, but at least one."""
    limit = max(1, SPAN_BYTES // bytes_per_column)
    spans, first, end, start = [], 0, 0, 0
    for block, width in enumerate(widths):
        if end > first and end + width - first > limit:
            spans.append(BlockSpan(first, end, widths[start:block]))
            first, start = end, block
        end += width
    return [*spans, BlockSpan(first, end, widths[start:])]
