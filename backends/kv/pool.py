"""KvPool: keys and values of all sequences of a model, in blocks that sequences share.

A block holds BLOCK_SIZE rows (tokens) of every layer. Its users are counted, so that n sequences of
one prompt store the prompt once; a sequence copies a shared block before it writes to it (vLLM's
paged attention: Kwon et al. 2023).

On a CPU the pool is address space: memory follows use, nothing is ever moved to grow, and unused
blocks are given back to the system. Blocks that do not fit in memory are in a file: see tiers.py.
On a GPU, where memory is reserved for it anyway, all of it is allocated with the first row.

Sliding-window layers keep their full length as well: the mask applies the window, so a rollback
finds all rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import torch
from transformers.cache_utils import Cache

from backends.attention.batch import BLOCK_SIZE, BatchLayout, runs_of
from backends.attention.stored_rows import OWN_FORMATS, KvFormats
from backends.contract.backend import BackendError
from backends.contract.nodes import NodeTable
from backends.kv.layer import PoolLayer
from backends.kv.slots import BlockSlots
from backends.recurrent.no_states import NoStates
from offload.ring.slots import Check


def no_check() -> None:
    """Let a wait go on."""


class BlockTable(Protocol):
    """The blocks of one sequence, and its tokens and nodes."""

    table: NodeTable

    @property
    def blocks(self) -> Sequence[int]: ...


class KvPool(NoStates, Cache):
    """The blocks of all layers, with the number of users of each.

    Args:
        n_blocks: maximum number of blocks.
        without_kv: layers that keep no keys and values.
        formats: number formats of the rows.
        n_hot: blocks that memory holds; None: all.
    """

    def __init__(
        self,
        n_layers: int,
        n_blocks: int,
        without_kv: Collection[int] = (),
        formats: KvFormats = OWN_FORMATS,
        n_hot: int | None = None,
    ) -> None:
        n_hot = n_blocks if n_hot is None else n_hot
        num_tokens = n_hot * BLOCK_SIZE
        super().__init__(layers=[PoolLayer(num_tokens, formats) for _ in range(n_layers)])
        self._without_kv = frozenset(without_kv)
        self.n_blocks = n_blocks
        self._n_users = [0] * n_blocks
        self._hot = BlockSlots(n_hot)
        """Blocks of memory; a block of the pool is the one of its number."""
        self.stores: weakref.WeakSet[BlockTable] = weakref.WeakSet()
        """Sequences of the pool."""

    @property
    def n_touched(self) -> int:
        """Blocks that take memory or space in a file."""
        return self._hot.n_touched

    @property
    def unused_bytes(self) -> int:
        """Bytes of blocks that take memory and are not in use."""
        return self._hot.n_unreleased * self.block_bytes

    def release_unused(self) -> None:
        """Give the memory of unused blocks back to the system."""
        for first, n in self._hot.release():
            for layer in self.layers:
                layer.release_rows(first * BLOCK_SIZE, n * BLOCK_SIZE)

    @property
    def n_bytes(self) -> int:
        """Bytes of memory that blocks take."""
        return self._hot.n_touched * self.block_bytes

    @property
    def block_bytes(self) -> int:
        return BLOCK_SIZE * sum(layer.row_bytes for layer in self.layers)

    @property
    def n_hot(self) -> int | None:
        """Blocks that memory holds, if there is a file for others."""
        return None

    @property
    def cold_bytes(self) -> int:
        """Bytes of blocks in a file."""
        return 0

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes read from a file and bytes written to it."""
        return 0, 0

    @property
    def stall_seconds(self) -> float:
        """Seconds that passes waited for a file."""
        return 0.0

    def growth_bytes(self, n_new: int, block_bytes: int) -> int:
        """Return the maximum memory that `n_new` more blocks of `block_bytes` take."""
        n_used = min(n_new + self.n_blocks - self.n_free, self.n_blocks)
        return max(0, n_used - self._hot.n_touched) * block_bytes

    def is_shared(self, block: int) -> bool:
        return self._n_users[block] > 1

    def take(self) -> int:
        """Return a block with one user. Raises BackendError if all are in use."""
        return self.take_many(1)[0]

    def take_many(self, n: int) -> list[int]:
        """Return `n` blocks for consecutive rows of a sequence, with one user each.

        Raises BackendError, and takes none, if too few are unused.
        """
        self._check_free(n)
        return [self._begin_use(self._hot.take()) for _ in range(n)]

    def _check_free(self, n: int) -> None:
        if self.n_free < n:
            num_tokens = self.n_blocks * BLOCK_SIZE
            raise BackendError(
                f"the KV cache is full: all of its {num_tokens} tokens are in use: end a "
                "sequence, or load the model with a larger context"
            )

    def _begin_use(self, block: int) -> int:
        self._n_users[block] = 1
        return block

    @property
    def n_free(self) -> int:
        """Unused blocks."""
        return self._hot.n_free

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
            self._end_use(block)

    def _end_use(self, block: int) -> None:
        self._hot.give_back(block)

    def own_copy(self, block: int) -> int:
        """Return a copy of a shared block, which loses a user (copy on write)."""
        other = self.take()
        for layer in self.layers:
            layer.copy_block(block, other)
        self.give_back(block)
        return other

    # --- blocks in memory and in a file; here all are in memory --------------------------------

    def places(self, blocks: Sequence[int]) -> np.ndarray:
        """Return the places of blocks, int64: the numbers by which layers hold their rows. They are
        valid until a block is taken."""
        return np.array(blocks, dtype=np.int64)

    def make_writable(self, blocks: Sequence[int]) -> None:
        """Have these blocks in memory until the next ones are taken."""

    def prepare(self, stores: Sequence[BlockTable]) -> None:
        """Note the sequences that the next pass takes blocks for."""

    def begin(
        self,
        rows: np.ndarray,
        tables: Sequence[np.ndarray] = (),
        gathered: BatchLayout | None = None,
        check: Check = no_check,
    ) -> None:
        """Begin a pass that writes these rows; see PoolLayer.begin.

        tables: places of the blocks that the pass reads.
        check: called while this waits.
        """
        runs = runs_of(rows)
        for layer in self.layers:
            layer.begin(runs, gathered)

    def reading(self, layer: int, check: Check = no_check) -> AbstractContextManager[None]:
        """Return the context in which a pass may use a layer; layers are used in order."""
        return nullcontext()

    def end(self, check: Check = no_check) -> None:
        """End a pass that used all layers."""

    def abandon(self) -> None:
        """End a pass that failed: nothing of it goes on afterwards."""

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
        self._hot.clear()

    def close(self) -> None:
        """Free memory, threads and files. Idempotent."""
        self.free()


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
