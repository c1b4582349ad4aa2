"""Makes the tensors of a grown model, chunk by chunk, from the source and random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np

from bench.synth.formats import WeightFormat
from bench.synth.growth import Fill, Patch, TensorPlan
from bench.synth.shapes import SynthError
from offload.units import MIB

_CHUNK_BYTES = 32 * MIB
_POOL_WEIGHTS = 8 * MIB
_STD = 0.02  # of trained matrices, about


class TensorMaker:
    """Fills tensors by `TensorPlan`, as rows of encoded blocks.

    Drawing and encoding billions of normal numbers would take minutes: one pool is drawn, and
    blocks are copied from random places of it.

    Args:
        read_source: float32 tensor of the source by name.
        format_of: in which format a tensor is written.
        seed: of everything random.
    """

    def __init__(
        self,
        read_source: Callable[[str], np.ndarray],
        format_of: Callable[[TensorPlan], WeightFormat],
        seed: int,
    ) -> None:
        self._read = read_source
        self._format_of = format_of
        self._seed = seed
        self._offsets = random.Random(seed)
        self._normal = np.random.default_rng(seed)
        self._loaded: tuple[str, np.ndarray] | None = None

    def n_bytes(self, plan: TensorPlan) -> int:
        """Bytes of a tensor.

        Raises:
            SynthError: its rows, or a patch in them, do not fill whole blocks.
        """
        form = self._format_of(plan)
        size, columns = form.block_size, plan.rows_and_columns[1]
        if columns % size:
            raise SynthError(
                f"rows of {columns} weights in {plan.name} do not fill blocks of {size} "
                f"({form.name}); choose another shape or dtype"
            )
        if any(patch.column % size for patch in plan.patches):
            raise SynthError(
                f"the source's heads do not fill blocks of {size} ({form.name}) in {plan.name}; "
                "choose a float dtype"
            )
        return form.n_bytes(plan.n_weights)

    def chunks(self, plan: TensorPlan) -> Iterator[memoryview]:
        """Yields the bytes of a tensor in order, a few rows at a time."""
        form = self._format_of(plan)
        n_rows, n_columns = plan.rows_and_columns
        n_blocks = n_columns // form.block_size
        step = max(1, _CHUNK_BYTES // (n_blocks * form.block_bytes))
        for first in range(0, n_rows, step):
            shape = (min(step, n_rows - first), n_blocks, form.block_bytes)
            rows = np.empty(shape, dtype=np.uint8)
            self._fill(rows, plan, form)
            for patch in plan.patches:
                self._apply(rows, first, patch, form)
            yield rows.data.cast("B")

    def _fill(self, rows: np.ndarray, plan: TensorPlan, form: WeightFormat) -> None:
        """Fills rows [n, blocks, block_bytes] with what the tensor holds outside its patches."""
        if plan.fill is Fill.ZERO:
            rows[:] = form.encode(np.zeros((1, form.block_size), np.float32))[0]
        elif plan.fill is Fill.RANDOM:
            self._randomise(rows, form)
        else:
            noise = self._normal.standard_normal(rows.shape[:2] + (form.block_size,), np.float32)
            gains = (1.0 + _STD * noise) * np.float32(plan.gain)
            rows[:] = _encode(gains.reshape(len(rows), -1), form)

    def _randomise(self, rows: np.ndarray, form: WeightFormat) -> None:
        """Copies random blocks into contiguous rows."""
        pool = _draw_pool(form, self._seed)
        flat = rows.reshape(-1, form.block_bytes)
        for start in range(0, len(flat), len(pool)):
            part = flat[start : start + len(pool)]
            offset = self._offsets.randrange(len(pool) - len(part) + 1)
            part[:] = pool[offset : offset + len(part)]

    def _apply(self, rows: np.ndarray, first: int, patch: Patch, form: WeightFormat) -> None:
        """Writes the part of a patch that lies in rows [first, first + len(rows)).

        Where the last block of a row is only partly the patch's, zeros fill it up: they are in
        new columns, where any value is right.
        """
        begin = max(first, patch.row)
        end = min(first + len(rows), patch.row + patch.n_rows)
        if begin >= end:
            return
        left = patch.column // form.block_size
        n_blocks = -(-patch.n_columns // form.block_size)
        values = np.zeros((end - begin, n_blocks * form.block_size), np.float32)
        if patch.source is None:
            drawn = self._normal.standard_normal((end - begin, patch.n_columns), np.float32)
            values[:, : patch.n_columns] = drawn * np.float32(_STD)
        else:
            skipped = patch.source_row + begin - patch.row
            part = self._source(patch.source)[
                skipped : skipped + end - begin,
                patch.source_column : patch.source_column + patch.n_columns,
            ]
            values[:, : patch.n_columns] = part * np.float32(patch.scale)
        rows[begin - first : end - first, left : left + n_blocks] = _encode(values, form)

    def _source(self, name: str) -> np.ndarray:
        """A tensor of the source with two dimensions; the last one read is kept."""
        if self._loaded is None or self._loaded[0] != name:
            tensor = self._read(name)
            self._loaded = (name, tensor if tensor.ndim == 2 else tensor.reshape(1, -1))
        return self._loaded[1]


def _encode(values: np.ndarray, form: WeightFormat) -> np.ndarray:
    """Encodes float32 [rows, columns] as uint8 [rows, blocks, block_bytes]."""
    blocks = form.encode(values.reshape(-1, form.block_size))
    return blocks.reshape(len(values), -1, form.block_bytes)


@lru_cache(maxsize=2)
def _draw_pool(form: WeightFormat, seed: int) -> np.ndarray:
    """Encoded normal numbers, uint8 [blocks, block_bytes]."""
    generator = np.random.default_rng(seed)
    pool = np.empty((_POOL_WEIGHTS // form.block_size, form.block_bytes), np.uint8)
    step = MIB // form.block_size  # bounds the float32 temporaries
    for start in range(0, len(pool), step):
        drawn = generator.standard_normal((step, form.block_size), np.float32)
        pool[start : start + step] = form.encode(drawn * np.float32(_STD))
    return pool
