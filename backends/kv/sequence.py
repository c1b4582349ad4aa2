"""The KV of one sequence: its rows are a committed prefix followed by live tree nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from backends.attention.batch import BLOCK_SIZE, SequencePart, rows_in_pool
from backends.attention.layout import PassLayout
from backends.contract.nodes import NodeTable
from backends.kv.pool import KvPool, blocks_of


class BlockStore:
    """Blocks of a pool, kept in step with a `NodeTable`.

    Row i of the sequence is row i % BLOCK_ROWS of its block i // BLOCK_ROWS.
    """

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self.table = NodeTable()
        self._blocks: list[int] = []

    @property
    def blocks(self) -> np.ndarray:
        """Where in the pool they lie, in order, int64."""
        return np.array(self._blocks, dtype=np.int64)

    def make_capacity(self, first: int, num_tokens: int) -> np.ndarray:
        """Let rows from `first` on be written, so many of them; where in the pool these are.

        Raises BackendError where the pool has no more blocks; nothing is lost then.
        """
        for at in range(first // BLOCK_SIZE, len(self._blocks)):
            if self._pool.is_shared(self._blocks[at]):
                self._blocks[at] = self._pool.own_copy(self._blocks[at])
        while len(self._blocks) < blocks_of(first + num_tokens):
            self._blocks.append(self._pool.take())
        return rows_in_pool(self.blocks, np.arange(first, first + num_tokens))

    def part(self, layout: PassLayout) -> SequencePart:
        return SequencePart(layout, self.blocks)

    @property
    def num_free_slots(self) -> int:
        """Rows that could be written behind those of the table now."""
        num_tokens, n_free = self.table.num_tokens, self._pool.n_free
        n_begun = num_tokens % BLOCK_SIZE
        if n_begun and self._pool.is_shared(self._blocks[blocks_of(num_tokens) - 1]):
            n_free -= 1  # for a copy of it
        return max(0, n_free * BLOCK_SIZE + (-num_tokens % BLOCK_SIZE if n_free >= 0 else 0))

    @property
    def num_free_slots_by_block(self) -> list[int]:
        """Rows that may be written before another block is taken; and again after that, where the
        first one taken is a copy of a shared one."""
        n_left = -self.table.num_tokens % BLOCK_SIZE
        if n_left and self._pool.is_shared(self._blocks[blocks_of(self.table.num_tokens) - 1]):
            return [0, n_left - 1]
        return [n_left]

    def n_blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many rows behind those of the table take from the pool."""
        first = self.table.num_tokens
        n_copied = sum(map(self._pool.is_shared, self._blocks[first // BLOCK_SIZE :]))
        return n_copied + max(0, blocks_of(first + num_tokens) - len(self._blocks))

    def add(self, parents: Sequence[int], token_ids: Sequence[int]) -> list[int]:
        return self.table.add(parents, token_ids)

    def append(self, token_ids: Sequence[int]) -> None:
        """Count the rows that a forward of these tokens wrote after the prefix as committed."""
        self.table.append(token_ids)
        self.trim()

    def commit(self, path: Sequence[int], keep: Collection[int] = ()) -> None:
        """Raises BackendError, and changes nothing, when `path` is no chain from the prefix."""
        prefix = self.table.n_committed
        self._select(prefix, self.table.commit(path, keep))

    def prune(self, nodes: Collection[int]) -> None:
        self._select(self.table.n_committed, self.table.prune(nodes))

    def rollback(self, length: int) -> None:
        self.table.rollback(length)
        self.trim()

    def abort(self, n_intact: int | None = None) -> None:
        """Drop every live node, and rows that a broken forward left behind.

        n_intact: rows that an interrupted operation did not touch; no more stay committed.
        """
        if n_intact is not None:
            self.table.cut(n_intact)
        self.table.drop_live()
        self.trim()

    def fork(self, length: int) -> BlockStore:
        """Another sequence with the first `length` tokens of the prefix, which both hold once."""
        other = BlockStore(self._pool)
        other.table.append(self.table.committed[:length])
        other._blocks = self._blocks[: blocks_of(length)]
        for block in other._blocks:
            self._pool.share(block)
        return other

    def trim(self) -> None:
        """Give back blocks without a row."""
        n_blocks = blocks_of(self.table.num_tokens)
        while len(self._blocks) > n_blocks:
            self._pool.give_back(self._blocks.pop())

    def check_integrity(self) -> None:
        """There is room for exactly the rows that the table knows."""
        if len(self._blocks) < blocks_of(self.table.num_tokens):
            raise RuntimeError(
                f"{len(self._blocks)} blocks do not hold the sequence's {self.table.num_tokens} rows"
            )

    def close(self) -> None:
        self.table.rollback(0)  # the ids of nodes are never used twice
        self.trim()

    def _select(self, prefix: int, order: list[int]) -> None:
        """Keep the prefix and these live rows, in this order."""
        new = np.arange(len(order))
        moved = np.flatnonzero(np.array(order, dtype=np.int64) != new)
        if len(moved):
            first = prefix + int(moved[0])
            old_rows = prefix + np.array(order, dtype=np.int64)[moved[0] :]
            sources = rows_in_pool(self.blocks, old_rows)
            targets = rows_in_pool(self.blocks, np.arange(first, prefix + len(order)))
            self._pool.copy_rows(sources, targets)
        self.trim()
