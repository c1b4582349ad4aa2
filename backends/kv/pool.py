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
from collections.abc import Collection, Sequence

import numpy as np
import torch
from transformers.cache_utils import Cache

from backends.attention.batch import BLOCK_SIZE, BatchLayout, runs_of
from backends.attention.stored_rows import OWN_FORMATS, KvFormats
from backends.contract.backend import BackendError
from backends.kv.layer import PoolLayer
from backends.recurrent.no_states import NoStates


class KvPool(NoStates, Cache):
    """The blocks of all layers, with the number of users of each.

    Args:
        n_blocks: maximum number of blocks.
        without_kv: layers that keep no keys and values.
        formats: number formats of the rows.
    """

    def __init__(
        self,
        n_layers: int,
        n_blocks: int,
        without_kv: Collection[int] = (),
        formats: KvFormats = OWN_FORMATS,
    ) -> None:
        num_tokens = n_blocks * BLOCK_SIZE
        super().__init__(layers=[PoolLayer(num_tokens, formats) for _ in range(n_layers)])
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
