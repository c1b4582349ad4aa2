"""Maker of the tensors of a grown model, chunk by chunk, from the source and random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np

from bench.synth.formats import WeightFormat
from bench.synth.shapes import SynthError
from bench.synth.tensors import Fill, Patch, TensorPlan
from offload.units import MIB

_CHUNK_BYTES = 32 * MIB
_FLOATS_AT_ONCE = MIB  # encoded together: bounds the float32 temporaries
_POOL_WEIGHTS = 8 * MIB
_STD = 0.02  # of trained matrices, about


class TensorMaker:
    """Maker of tensors by `TensorPlan`, as rows of encoded blocks.

    Drawing and encoding billions of normal numbers would take minutes: one pool is drawn, and
    blocks are copied from random places of it.

    Args:
        read_source: function (name, rows) -> float32 [rows, columns] of the source.
        format_of: function from a plan to the format of its tensor.
        seed: seed of all random numbers.
    """

    def __init__(
        self,
        read_source: Callable[[str, range], np.ndarray],
        format_of: Callable[[TensorPlan], WeightFormat],
        seed: int,
    ) -> None:
        self._read = read_source
        self._format_of = format_of
        self._seed = seed
        self._offsets = random.Random(seed)
        self._normal = np.random.default_rng(seed)
        self._loaded: tuple[tuple[str, range], np.ndarray] | None = None

    def n_bytes(self, plan: TensorPlan) -> int:
        """Return the bytes of a tensor.

        Raises:
            SynthError: zeros in it would not be exact.
        """
        form, n_columns = self._format_of(plan), plan.rows_and_columns[1]
        group = form.zero_group
        edges = _open_edges(plan.patches)
        if plan.fill is Fill.ZERO and any(edge % group for edge in edges - {n_columns}):
            raise SynthError(
                f"the source's weights in {plan.name} do not fill groups of {group}, so that the "
                f"zeros beside them would not be exact in {form.name}; choose q4_0, q8_0, q6_k or "
                "a float dtype"
            )
        return form.n_bytes(plan.n_weights)

    def chunks(self, plan: TensorPlan, row_step: int = 1) -> Iterator[memoryview]:
        """Yield the bytes of a tensor in order, some multiple of `row_step` rows at a time."""
        form = self._format_of(plan)
        num_rows, n_columns = plan.rows_and_columns
        n_blocks = n_columns // form.block_size
        step = row_step * max(1, _CHUNK_BYTES // (row_step * n_blocks * form.block_bytes))
        bands = _bands(plan.patches, form)
        for first in range(0, num_rows, step):
            shape = (min(step, num_rows - first), n_blocks, form.block_bytes)
            rows = np.empty(shape, dtype=np.uint8)
            self._fill(rows, plan, form)
            for band in bands:
                self._apply(rows, first, band, form)
            yield rows.data.cast("B")

    def _fill(self, rows: np.ndarray, plan: TensorPlan, form: WeightFormat) -> None:
        """Fill rows [n, blocks, block_bytes] with the tensor's contents outside its patches."""
        if plan.fill is Fill.ZERO:
            rows[:] = form.encode(np.zeros((1, form.block_size), np.float32))[0]
        elif plan.fill is Fill.RANDOM:
            self._randomise(rows, form)
        else:
            noise = self._normal.standard_normal(rows.shape[:2] + (form.block_size,), np.float32)
            gains = (1.0 + _STD * noise) * np.float32(plan.gain) + np.float32(plan.offset)
            rows[:] = _encode(gains.reshape(len(rows), -1), form)

    def _randomise(self, rows: np.ndarray, form: WeightFormat) -> None:
        """Copy random blocks into contiguous rows."""
        pool = _draw_pool(form, self._seed)
        flat = rows.reshape(-1, form.block_bytes)
        for start in range(0, len(flat), len(pool)):
            part = flat[start : start + len(pool)]
            offset = self._offsets.randrange(len(pool) - len(part) + 1)
            part[:] = pool[offset : offset + len(part)]

    def _apply(self, rows: np.ndarray, first: int, band: list[Patch], form: WeightFormat) -> None:
        """Write the part of a band that is in rows [first, first + len(rows)).

        The rest of a block that patches cover only partly is zero, as `o_proj` and `down_proj`
        require; elsewhere any value would do.
        """
        begin = max(first, band[0].row)
        end = min(first + len(rows), band[0].row + band[0].num_tokens)
        left = band[0].column // form.block_size
        right = -(-band[-1].end_column // form.block_size)
        n_columns = (right - left) * form.block_size
        step = max(1, _FLOATS_AT_ONCE // n_columns)
        for top in range(begin, end, step):
            some = range(top, min(top + step, end))
            values = np.zeros((len(some), n_columns), np.float32)
            for patch in band:
                column = patch.column - left * form.block_size
                values[:, column : column + patch.n_columns] = self._values(patch, some)
            rows[some.start - first : some.stop - first, left:right] = _encode(values, form)

    def _values(self, patch: Patch, rows: range) -> np.ndarray:
        """Return a patch's values for these rows of the grown tensor, float32."""
        if patch.source is None:
            drawn = self._normal.standard_normal((len(rows), patch.n_columns), np.float32)
            return drawn * np.float32(_STD * patch.scale)
        skipped = patch.source_row - patch.row
        part = self._source(patch.source, range(rows.start + skipped, rows.stop + skipped))
        columns = slice(patch.source_column, patch.source_column + patch.n_columns)
        return part[:, columns] * np.float32(patch.scale) + np.float32(patch.offset)

    def _source(self, name: str, rows: range) -> np.ndarray:
        """Return rows of a tensor of the source; the last ones are cached for the next head."""
        if self._loaded is None or self._loaded[0] != (name, rows):
            self._loaded = ((name, rows), self._read(name, rows))
        return self._loaded[1]


def _open_edges(patches: tuple[Patch, ...]) -> set[int]:
    """Return columns where patches begin or end without a neighbour in the same rows."""
    starts = {(patch.row, patch.num_tokens, patch.column) for patch in patches}
    ends = {(patch.row, patch.num_tokens, patch.end_column) for patch in patches}
    return {column for _, _, column in starts ^ ends}


def _bands(patches: tuple[Patch, ...], form: WeightFormat) -> list[list[Patch]]:
    """Group patches from left to right that share blocks of the same rows."""
    bands: list[list[Patch]] = []
    for patch in sorted(patches, key=lambda patch: (patch.row, patch.column)):
        before = bands[-1][-1] if bands else None
        if (
            before is not None
            and (before.row, before.num_tokens) == (patch.row, patch.num_tokens)
            and before.end_column > patch.column // form.block_size * form.block_size
        ):
            bands[-1].append(patch)
        else:
            bands.append([patch])
    return bands


def _encode(values: np.ndarray, form: WeightFormat) -> np.ndarray:
    """Encode float32 [rows, columns] as uint8 [rows, blocks, block_bytes]."""
    blocks = form.encode(values.reshape(-1, form.block_size))
    return blocks.reshape(len(values), -1, form.block_bytes)


@lru_cache(maxsize=4)  # formats of one file's matrices
def _draw_pool(form: WeightFormat, seed: int) -> np.ndarray:
    """Return encoded normal numbers, uint8 [blocks, block_bytes]."""
    generator = np.random.default_rng(seed)
    pool = np.empty((_POOL_WEIGHTS // form.block_size, form.block_bytes), np.uint8)
    step = _FLOATS_AT_ONCE // form.block_size
    for start in range(0, len(pool), step):
        drawn = generator.standard_normal((step, form.block_size), np.float32)
        pool[start : start + step] = form.encode(drawn * np.float32(_STD))
    return pool
