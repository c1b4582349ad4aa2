"""Makes the tensors of a grown model, chunk by chunk, from the source and random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import lru_cache

import torch

from bench.growth import Fill, Patch, TensorPlan
from offload.units import MIB

BYTES_PER_WEIGHT = {"bf16": 2, "fp32": 4}
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_CHUNK_BYTES = 32 * MIB
_POOL_BYTES = 64 * MIB
_STD = 0.02  # of trained matrices, about


class TensorMaker:
    """Fills tensors by `TensorPlan`.

    Drawing billions of normal numbers would take minutes: one block is drawn and copied from
    random offsets.
    """

    def __init__(self, read_source: Callable[[str], torch.Tensor], dtype: str, seed: int) -> None:
        self._read = read_source
        self._dtype = _DTYPES[dtype]
        self._bytes_per_weight = BYTES_PER_WEIGHT[dtype]
        self._offsets = random.Random(seed)
        self._pool = _draw_pool(self._dtype, seed)
        self._loaded: tuple[str, torch.Tensor] | None = None

    def chunks(self, plan: TensorPlan) -> Iterator[memoryview]:
        """Yields the bytes of a tensor in order, a few rows at a time."""
        n_rows, n_columns = plan.rows_and_columns
        step = max(1, _CHUNK_BYTES // (n_columns * self._bytes_per_weight))
        for first in range(0, n_rows, step):
            rows = torch.empty((min(step, n_rows - first), n_columns), dtype=self._dtype)
            self._fill(rows, plan)
            for patch in plan.patches:
                self._apply(rows, first, patch)
            yield memoryview(rows.view(torch.uint8).numpy()).cast("B")

    def _fill(self, rows: torch.Tensor, plan: TensorPlan) -> None:
        if plan.fill is Fill.ZERO:
            rows.zero_()
            return
        self._randomise(rows)
        if plan.fill is Fill.GAIN:
            rows.add_(1.0).mul_(plan.gain)

    def _randomise(self, rows: torch.Tensor) -> None:
        """Writes random values into a contiguous tensor."""
        flat = rows.view(-1)
        for start in range(0, flat.numel(), self._pool.numel()):
            part = flat[start : start + self._pool.numel()]
            offset = self._offsets.randrange(self._pool.numel() - part.numel() + 1)
            part.copy_(self._pool[offset : offset + part.numel()])

    def _apply(self, rows: torch.Tensor, first: int, patch: Patch) -> None:
        """Writes the part of a patch that lies in rows [first, first + len(rows))."""
        begin = max(first, patch.row)
        end = min(first + len(rows), patch.row + patch.n_rows)
        if begin >= end:
            return
        columns = slice(patch.column, patch.column + patch.n_columns)
        if patch.source is None:
            values = torch.empty((end - begin, patch.n_columns), dtype=self._dtype)
            self._randomise(values)
        else:
            source = self._source(patch.source)
            skipped = patch.source_row + begin - patch.row
            values = source[
                skipped : skipped + end - begin,
                patch.source_column : patch.source_column + patch.n_columns,
            ].float()
            if patch.scale != 1.0:
                values = values * patch.scale
        rows[begin - first : end - first, columns] = values.to(self._dtype)

    def _source(self, name: str) -> torch.Tensor:
        """A tensor of the source with two dimensions; the last one read is kept."""
        if self._loaded is None or self._loaded[0] != name:
            tensor = self._read(name)
            self._loaded = (name, tensor if tensor.ndim == 2 else tensor.view(1, -1))
        return self._loaded[1]


@lru_cache(maxsize=1)
def _draw_pool(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A block of normal numbers, `_POOL_BYTES` large."""
    generator = torch.Generator().manual_seed(seed)
    n_weights = _POOL_BYTES // dtype.itemsize
    pool = torch.empty(n_weights, dtype=dtype)
    for part in pool.split(4 * MIB):  # bounds the float32 temporaries
        part.copy_(torch.randn(part.numel(), generator=generator).mul_(_STD))
    return pool
