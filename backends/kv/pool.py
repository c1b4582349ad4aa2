"""KvPool: keys and values of all sequences of a model, in blocks that sequences share.

A block holds BLOCK_SIZE rows (tokens) of every layer. Its users are counted, so that n sequences of
one prompt store the prompt once; a sequence copies a shared block before it writes to it (vLLM's
paged attention: Kwon et al. 2023).

On a CPU the pool is address space: memory follows use, nothing is ever moved to grow, and unused
blocks are given back to the system. On a GPU, where memory is reserved for it anyway, all of it is
allocated with the first row. Sliding-window layers keep their full length as well: the mask applies
the window, so a rollback finds all rows.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from backends.attention.batch import BLOCK_SIZE, BatchLayout, rows_in_pool, runs_of
from backends.contract.backend import BackendError
from backends.recurrent.no_states import NoStates
from offload.storage.aligned import AlignedBuffer

Run = tuple[int, int, int]
"""(first new row of a pass, first row of the pool, number of rows)"""


class PoolLayer(CacheLayerMixin):
    """Keys and values of one decoder layer, [1, heads, rows of the pool, dim] each."""

    is_sliding = False

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self._num_tokens = num_tokens
        self._runs: Sequence[Run] = ()
        self._gathered: BatchLayout | None = None
        self._buffers: list[AlignedBuffer | None] = [None, None]
        self.n_written = 0
        """New rows written in this pass so far."""

    def begin(self, runs: Sequence[Run], gathered: BatchLayout | None) -> None:
        """Begin a pass whose new rows belong to these rows of the pool.

        gathered: layout of the pass, if attention needs its keys in order.
        """
        self._runs, self._gathered, self.n_written = runs, gathered, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take the head counts, widths and dtype from the first states."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self._buffers[0] = _rows(key_states, self._num_tokens)
        self.values, self._buffers[1] = _rows(value_states, self._num_tokens)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write states [1, heads, n, dim] to the next n new rows.

        Returns all rows of the pool, or [1, heads, keys, dim] in order if `gathered` was given.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        start, end = self.n_written, self.n_written + key_states.shape[-2]
        for pool, states in ((self.keys, key_states), (self.values, value_states)):
            _check_shape(pool, states)
            for first, row, num_tokens in self._runs:
                a, b = max(first, start), min(first + num_tokens, end)
                if a < b:
                    at = row + a - first
                    pool[:, :, at : at + b - a] = states[:, :, a - start : b - start]
        self.n_written = end
        if self._gathered is None:
            return self.keys, self.values
        rows = _rows_in_order(self._gathered, end)
        return _take(self.keys, rows), _take(self.values, rows)

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
        self._buffers = [None, None]
        self.is_initialized = False

    def get_seq_length(self) -> int:
        return 0  # positions are given with every pass

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


class KvPool(NoStates, Cache):
    """The blocks of all layers, with the number of users of each.

    Args:
        n_blocks: maximum number of blocks.
        without_kv: layers that keep no keys and values.
    """

    def __init__(self, n_layers: int, n_blocks: int, without_kv: Collection[int] = ()) -> None:
        super().__init__(layers=[PoolLayer(n_blocks * BLOCK_SIZE) for _ in range(n_layers)])
        self._without_kv = frozenset(without_kv)
        self.n_blocks = n_blocks
        self._n_users = [0] * n_blocks
        # Heaps: low ones first, so that runs are long.
        self._given_back: list[int] = []
        self._released: list[int] = []  # of these, those that take no memory
        self._n_begun = 0
        """Blocks that were ever in use."""

    @property
    def n_touched(self) -> int:
        """Blocks that take memory: those in use, and those that were since the last release."""
        return self._n_begun - len(self._released)

    @property
    def unused_bytes(self) -> int:
        """Bytes of blocks that take memory and are not in use."""
        return len(self._given_back) * self.block_bytes

    def release_unused(self) -> None:
        """Give the memory of unused blocks back to the system."""
        blocks = np.array(sorted(self._given_back), dtype=np.int64)
        if not len(blocks):
            return
        for run in np.split(blocks, np.flatnonzero(np.diff(blocks) != 1) + 1):
            for layer in self.layers:
                layer.release_rows(int(run[0]) * BLOCK_SIZE, len(run) * BLOCK_SIZE)
        self._released = sorted([*self._released, *self._given_back])
        self._given_back = []

    @property
    def n_bytes(self) -> int:
        """Bytes of the blocks that take memory."""
        return self.n_touched * self.block_bytes

    @property
    def block_bytes(self) -> int:
        return BLOCK_SIZE * sum(layer.row_bytes for layer in self.layers)

    def is_shared(self, block: int) -> bool:
        return self._n_users[block] > 1

    def take(self) -> int:
        """Return a block with one user. Raises BackendError if all are in use."""
        if self._given_back:
            block = heapq.heappop(self._given_back)
        elif self._released:
            block = heapq.heappop(self._released)
        elif self._n_begun < self.n_blocks:
            block = self._n_begun
            self._n_begun += 1
        else:
            num_tokens = self.n_blocks * BLOCK_SIZE
            raise BackendError(
                f"the KV cache is full: all of its {num_tokens} tokens are in use: end a "
                "sequence, or load the model with a larger context"
            )
        self._n_users[block] = 1
        return block

    @property
    def n_free(self) -> int:
        """Unused blocks."""
        return self.n_blocks - self.n_touched + len(self._given_back)

    @property
    def n_shared(self) -> int:
        """Blocks that would be needed in addition if none were shared."""
        return sum(n_users - 1 for n_users in self._n_users if n_users)

    @property
    def is_unused(self) -> bool:
        return not any(self._n_users)

    def share(self, block: int) -> None:
        self._n_users[block] += 1

    def give_back(self, block: int) -> None:
        self._n_users[block] -= 1
        if not self._n_users[block]:
            heapq.heappush(self._given_back, block)

    def own_copy(self, block: int) -> int:
        """Return a copy of a shared block, which loses a user (copy on write)."""
        other = self.take()
        for layer in self.layers:
            layer.copy_block(block, other)
        self.give_back(block)
        return other

    def begin(self, rows: np.ndarray, gathered: BatchLayout | None = None) -> None:
        """See PoolLayer.begin."""
        runs = runs_of(rows)
        for layer in self.layers:
            layer.begin(runs, gathered)

    def copy_rows(self, sources: np.ndarray, targets: np.ndarray) -> None:
        initialized = [layer for layer in self.layers if layer.is_initialized]
        if initialized:  # all on one device, to which the rows go once
            device = initialized[0].device
            old, new = (torch.from_numpy(rows).to(device) for rows in (sources, targets))
            for layer in initialized:
                layer.copy_rows(old, new)

    def check_written(self, num_tokens: int) -> None:
        """Raise RuntimeError if a layer did not write this pass's rows."""
        for i, layer in enumerate(self.layers):
            if layer.n_written != num_tokens and i not in self._without_kv:
                raise RuntimeError(
                    f"KV cache layer {i} was given {layer.n_written} rows, expected {num_tokens}"
                )

    def free_if_unused(self) -> None:
        if self.is_unused:
            self.free()

    def free(self) -> None:
        """Free the memory; sequences must not be used any more."""
        for layer in self.layers:
            layer.free()
        self._n_users = [0] * self.n_blocks
        self._given_back.clear()
        self._released.clear()
        self._n_begun = 0


def blocks_of(num_tokens: int) -> int:
    """Return the number of blocks for `num_tokens` of one sequence."""
    return -(-num_tokens // BLOCK_SIZE)


def max_new_blocks(num_free_slots_by_block: Sequence[int], num_tokens: int) -> int:
    """Return the maximum number of new blocks for `num_tokens` more of any sequences.

    num_free_slots_by_block: free slots of begun blocks, which are filled before new ones are taken.
    """
    n_begun = 0
    for left in sorted(num_free_slots_by_block or (0,)):
        if num_tokens <= left:
            return n_begun
        num_tokens -= left + 1
        n_begun += 1
    return n_begun + num_tokens // BLOCK_SIZE  # each of these has BLOCK_SIZE - 1 free slots by now


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


def _take(pool: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """Return these rows, [1, heads, rows, dim]; without a copy if they are consecutive."""
    runs = runs_of(rows)
    if len(runs) == 1:
        return pool[:, :, runs[0][1] : runs[0][1] + len(rows)]
    return pool.index_select(2, torch.from_numpy(rows).to(pool.device))


def _check_shape(pool: torch.Tensor, states: torch.Tensor) -> None:
    """Raise BackendError if loaded rows, from a manipulated file, have another shape."""
    if (pool.shape[1], pool.shape[3]) != (states.shape[1], states.shape[3]):
        raise BackendError(
            f"the KV cache holds {pool.shape[1]} heads of {pool.shape[3]} numbers, the model has "
            f"{states.shape[1]} of {states.shape[3]}: remove the prompt cache file"
        )
