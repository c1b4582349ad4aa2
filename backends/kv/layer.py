"""PoolLayer: rows of keys and values of one decoder layer, as the pool's blocks hold them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from backends.attention.batch import BLOCK_SIZE, BatchLayout, rows_in_pool, runs_of
from backends.attention.stored_rows import MODEL_DTYPE, OWN_FORMATS, KvFormats, StoredRows
from backends.contract.backend import BackendError
from offload.storage.aligned import AlignedBuffer

Run = tuple[int, int, int]
"""(first new row of a pass, first row of the pool, number of rows)"""
Rows: TypeAlias = torch.Tensor | StoredRows
"""Keys or values [1, heads, rows, dim]; a tensor if they are in the model's dtype."""


class PoolLayer(CacheLayerMixin):
    """Keys and values of one decoder layer, [1, heads, rows of the pool, width] each, where the
    width is the head dim or, in another format than the model's dtype, that of a stored row."""

    is_sliding = False

    def __init__(self, num_tokens: int, formats: KvFormats = OWN_FORMATS) -> None:
        super().__init__()
        self._num_tokens, self._formats = num_tokens, formats
        self._dims = (0, 0)
        self._runs: Sequence[Run] = ()
        self._gathered: BatchLayout | None = None
        self._buffers: list[AlignedBuffer | None] = [None, None]
        self._staging: torch.Tensor | None = None
        self.n_written = 0
        """New rows written in this pass so far."""

    def begin(self, runs: Sequence[Run], gathered: BatchLayout | None) -> None:
        """Begin a pass whose new rows belong to these rows of the pool.

        gathered: layout of the pass, if attention needs its keys in order.
        """
        self._runs, self._gathered, self.n_written = runs, gathered, 0

    def stage(self, blocks: torch.Tensor | None) -> None:
        """Let the rows after those of the pool be in `blocks`, uint8 [blocks, bytes]: of each
        block the keys, then the values, [heads, BLOCK_SIZE, width]. None ends that."""
        self._staging = blocks

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take the head counts, widths and dtypes from the first stored rows."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self._buffers[0] = _rows(key_states, self._num_tokens)
        self.values, self._buffers[1] = _rows(value_states, self._num_tokens)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[Rows, Rows]:
        """Write states [1, heads, n, dim] to the next n new rows.

        Returns all rows of the pool, or [1, heads, keys, dim] in order if `gathered` was given.
        """
        of_keys, of_values = self._formats
        dims = key_states.shape[-1], value_states.shape[-1]
        self.write(of_keys.encode(key_states), of_values.encode(value_states), dims)
        if self._gathered is None:
            return self.rows
        rows, dtype = _rows_in_order(self._gathered, self.n_written), key_states.dtype
        keys, values = (_take(StoredRows.of(x), rows) for x in self.rows)
        return keys.decoded(dtype), values.decoded(dtype)

    def write(self, keys: torch.Tensor, values: torch.Tensor, dims: tuple[int, int]) -> None:
        """Write stored rows [1, heads, n, width] to the next n new rows; `dims` are those of their
        heads."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        assert self.keys is not None
        assert self.values is not None
        self._dims = dims
        start, end = self.n_written, self.n_written + keys.shape[-2]
        staged = self._staged
        for i, (pool, stored) in enumerate(((self.keys, keys), (self.values, values))):
            _check_shape(pool, stored)
            for first, row, num_tokens in self._runs:
                a, b = max(first, start), min(first + num_tokens, end)
                if a >= b:
                    continue
                at, new = row + a - first, stored[:, :, a - start : b - start]
                n_pool = min(max(0, self._num_tokens - at), b - a)
                pool[:, :, at : at + n_pool] = new[:, :, :n_pool]
                if n_pool < b - a:
                    of_blocks = at + n_pool - self._num_tokens
                    _write_blocks(staged[i], of_blocks, new[0, :, n_pool:])
        self.n_written = end

    @property
    def _staged(self) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Keys and values of the staged blocks, [blocks, heads, BLOCK_SIZE, width]."""
        staging = self._staging
        if staging is None or self.keys is None or self.values is None:
            return None, None
        views, end = [], 0
        for pool in (self.keys, self.values):
            shape = (pool.shape[1], BLOCK_SIZE, pool.shape[3])
            start, end = end, end + math.prod(shape) * pool.itemsize
            views.append(staging[:, start:end].view(pool.dtype).unflatten(1, shape))
        return views[0], views[1]

    @property
    def rows(self) -> tuple[Rows, Rows]:
        """All rows of keys and of values, as attention reads them; after the first write."""
        assert self.keys is not None
        assert self.values is not None
        keys, values = (
            pool
            if row_format is MODEL_DTYPE and staged is None
            else StoredRows(pool, row_format, dim, staged)
            for pool, row_format, dim, staged in zip(
                (self.keys, self.values), self._formats, self._dims, self._staged, strict=True
            )
        )
        return keys, values

    @property
    def stored_rows(self) -> tuple[StoredRows, StoredRows]:
        """All rows of keys and of values; after the first write."""
        keys, values = map(StoredRows.of, self.rows)
        return keys, values

    def write_block(self, block: int, staged: torch.Tensor) -> None:
        """Copy a block of the pool to `staged`, as in `stage` [1, bytes]."""
        self._copy_block(block, staged, is_read=False)

    def read_block(self, block: int, staged: torch.Tensor) -> None:
        """Copy `staged`, as in `stage` [1, bytes], to a block of the pool."""
        self._copy_block(block, staged, is_read=True)

    def _copy_block(self, block: int, staged: torch.Tensor, *, is_read: bool) -> None:
        end = 0
        for pool in (self.keys, self.values):
            assert pool is not None, "a block in use was written to"
            rows = pool[0, :, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE]
            start, end = end, end + rows.numel() * pool.itemsize
            own = staged[0, start:end].view(pool.dtype).view(rows.shape)
            if is_read:
                rows.copy_(own)
            else:
                own.copy_(rows)

    def copy_rows(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy rows; all of them are read before the first one is written."""
        for pool in (self.keys, self.values):
            if pool is not None:
                pool[:, :, targets] = pool.index_select(2, sources)

    def copy_block(self, source: int, target: int) -> None:
        for pool in (self.keys, self.values):
            if pool is not None:
                blocks = pool.unflatten(2, (-1, BLOCK_SIZE))
                blocks[:, :, target] = blocks[:, :, source]

    def release_rows(self, first: int, num_tokens: int) -> None:
        """Give the memory of rows that nothing uses back to the system."""
        for pool, buffer in zip((self.keys, self.values), self._buffers, strict=True):
            if pool is not None and buffer is not None:
                width = pool.shape[3] * pool.itemsize
                for head in range(pool.shape[1]):
                    at = head * self._num_tokens + first
                    buffer.release(at * width, num_tokens * width)

    @property
    def row_bytes(self) -> int:
        pools = (pool for pool in (self.keys, self.values) if pool is not None)
        return sum(pool.shape[1] * pool.shape[3] * pool.itemsize for pool in pools)

    def free(self) -> None:
        self.keys = self.values = None
        self._buffers, self._staging = [None, None], None
        self.is_initialized = False

    def get_seq_length(self) -> int:
        return 0  # positions are given with every pass

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


def _rows(states: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, AlignedBuffer | None]:
    """Allocate rows like `states`, [1, heads, num_tokens, dim]; return them and, on a CPU, their
    memory."""
    shape = (1, states.shape[1], num_tokens, states.shape[3])
    if states.device.type != "cpu" or 0 in shape:  # no rotary part (Mistral Large 4)
        return torch.empty(shape, dtype=states.dtype, device=states.device), None
    n_numbers = math.prod(shape)
    n_bytes = n_numbers * states.dtype.itemsize
    memory = AlignedBuffer(n_bytes, is_committed=False, is_huge=False)
    rows = torch.frombuffer(memory.view, dtype=states.dtype, count=n_numbers)
    return rows.view(shape), memory


def _rows_in_order(layout: BatchLayout, end: int) -> np.ndarray:
    """Return the pool's rows of all sequences, one sequence after the other."""
    of_sequences = [(part.table, part.n_keys(n_new)) for part, n_new in layout.cached(end)]
    return np.concatenate([rows_in_pool(table, np.arange(n)) for table, n in of_sequences])


def _take(rows: StoredRows, numbers: np.ndarray) -> StoredRows:
    """Return the rows of these numbers; without a copy if they are consecutive in the pool."""
    runs = runs_of(numbers)
    if len(runs) == 1 and runs[0][1] + len(numbers) <= rows.stored.shape[2]:
        first = runs[0][1]
        return replace(rows, stored=rows.stored[:, :, first : first + len(numbers)], staged=None)
    return rows.take(torch.from_numpy(numbers).to(rows.stored.device))


def _write_blocks(blocks: torch.Tensor | None, first: int, rows: torch.Tensor) -> None:
    """Write rows [heads, n, width] from row `first` of the blocks on."""
    assert blocks is not None, "rows beyond the pool are staged"
    at, num_tokens = 0, rows.shape[1]
    while at < num_tokens:
        block, row = divmod(first + at, BLOCK_SIZE)
        n = min(BLOCK_SIZE - row, num_tokens - at)
        blocks[block, :, row : row + n] = rows[:, at : at + n]
        at += n


def _check_shape(pool: torch.Tensor, states: torch.Tensor) -> None:
    """Raise BackendError if loaded rows, from a manipulated file, have another shape."""
    if (pool.shape[1], pool.shape[3]) != (states.shape[1], states.shape[3]):
        raise BackendError(
            f"the KV cache holds {pool.shape[1]} heads of {pool.shape[3]} numbers, the model has "
            f"{states.shape[1]} of {states.shape[3]}: remove the prompt cache file"
        )
