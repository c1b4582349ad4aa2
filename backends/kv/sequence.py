"""BlockStore: the KV of one sequence; rows of a committed prefix, then of live tree nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from backends.attention.batch import BLOCK_SIZE, SequencePart, rows_in_pool
from backends.attention.layout import PassLayout
from backends.contract.backend import KvFileError
from backends.contract.nodes import NodeTable
from backends.kv.pool import KvPool, blocks_of, max_new_blocks
from backends.recurrent.states import RecurrentStates


def new_blocks(stores: Sequence[BlockStore], num_tokens: int, num_new_seqs: int) -> int:
    """Return the maximum number of blocks that sequences take in one pass.

    num_tokens: tokens of all of them after the pass.
    """
    num_new = max(0, num_tokens - sum(store.table.n_committed for store in stores))
    num_free_slots = [n for store in stores for n in store.num_free_slots_by_block]
    return max_new_blocks(num_free_slots + [0] * num_new_seqs, num_new)


class BlockStore:
    """Blocks of a pool, and the states of recurrent layers, kept in step with a `NodeTable`.

    Row i of the sequence is row i % BLOCK_SIZE of its block i // BLOCK_SIZE.
    """

    def __init__(self, pool: KvPool, recurrent: RecurrentStates | None = None) -> None:
        self._pool, self.recurrent = pool, recurrent
        self.table = NodeTable()
        self._blocks: list[int] = []
        pool.stores.add(self)

    @property
    def blocks(self) -> Sequence[int]:
        """Numbers of its blocks in the pool, in order."""
        return self._blocks

    @property
    def places(self) -> np.ndarray:
        """Places of its blocks, in order, int64; see KvPool.places."""
        return self._pool.places(self._blocks)

    def prepare(self, stores: Sequence[BlockStore]) -> None:
        """See KvPool.prepare."""
        self._pool.prepare(stores)

    def make_writable(self, first: int) -> None:
        """Have its blocks from row `first` on in memory, and for itself.

        Raises BackendError, and loses nothing, if the pool has no more blocks.
        """
        with self._naming_itself():
            for at in range(first // BLOCK_SIZE, len(self._blocks)):
                if self._pool.is_shared(self._blocks[at]):
                    self._blocks[at] = self._pool.own_copy(self._blocks[at])
            self._pool.make_writable(self._blocks[first // BLOCK_SIZE :])

    def take_blocks(self, first: int, num_tokens: int) -> None:
        """Take the blocks that `num_tokens` rows from `first` on need beside those it has.

        Raises BackendError, and loses nothing, if the pool has no more blocks.
        """
        with self._naming_itself():
            n_more = blocks_of(first + num_tokens) - len(self._blocks)
            self._blocks += self._pool.take_many(max(0, n_more))

    @contextmanager
    def _naming_itself(self) -> Iterator[None]:
        """Add this sequence to an error of the KV file."""
        try:
            yield
        except KvFileError as error:
            error.stores = (self,)
            raise

    def rows(self, first: int, num_tokens: int) -> np.ndarray:
        """Return the rows in the pool of `num_tokens` rows from `first` on."""
        return rows_in_pool(self.places, np.arange(first, first + num_tokens))

    def part(self, layout: PassLayout) -> SequencePart:
        return SequencePart(layout, self.places)

    @property
    def num_free_slots(self) -> int:
        """Rows that can be written after those of the table now."""
        num_tokens, n_free = self.table.num_tokens, self._pool.n_free
        n_begun = num_tokens % BLOCK_SIZE
        if n_begun and self._pool.is_shared(self._blocks[blocks_of(num_tokens) - 1]):
            n_free -= 1  # for the copy of the shared block
        return max(0, n_free * BLOCK_SIZE + (-num_tokens % BLOCK_SIZE if n_free >= 0 else 0))

    @property
    def num_free_slots_by_block(self) -> list[int]:
        """Rows that can be written before a new block is taken. A shared block has none: the first
        new block is its copy, which has the next ones."""
        n_left = -self.table.num_tokens % BLOCK_SIZE
        if n_left and self._pool.is_shared(self._blocks[blocks_of(self.table.num_tokens) - 1]):
            return [0, n_left - 1]
        return [n_left]

    def n_blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that `num_tokens` more than those of the table take from the pool."""
        first = self.table.num_tokens
        n_copied = sum(map(self._pool.is_shared, self._blocks[first // BLOCK_SIZE :]))
        return n_copied + max(0, blocks_of(first + num_tokens) - len(self._blocks))

    def n_end_blocks(self, num_tokens: int) -> int:
        """Return the blocks after the full ones of the prefix, with `num_tokens` more tokens."""
        return blocks_of(self.table.num_tokens + num_tokens) - self.table.n_committed // BLOCK_SIZE

    def add(self, parents: Sequence[int], token_ids: Sequence[int]) -> list[int]:
        return self.table.add(parents, token_ids)

    def append(self, token_ids: Sequence[int]) -> None:
        """Append tokens whose rows a pass has written to the committed prefix."""
        self.table.append(token_ids)
        self.trim()

    def commit(self, path: Sequence[int], keep: Collection[int] = ()) -> None:
        """Commit `path`. Raises BackendError, and changes nothing, if it is no chain."""
        prefix = self.table.n_committed
        self._select(prefix, self.table.commit(path, keep))

    def prune(self, nodes: Collection[int]) -> None:
        self._select(self.table.n_committed, self.table.prune(nodes))

    def restorable(self, length: int) -> int:
        return length if self.recurrent is None else self.recurrent.restorable(length)

    @property
    def snapshot_lengths(self) -> tuple[int, ...]:
        return (self.table.n_committed,)

    def rollback(self, length: int) -> None:
        self.table.rollback(self.restorable(length) if length > 0 else length)
        self.trim()
        if self.recurrent is not None:
            self.recurrent.compact()

    def abort(self, n_intact: int | None = None) -> None:
        """Drop every live node, and rows that a failed pass left after the prefix.

        n_intact: committed tokens that the failed operation did not touch; None: all.
        """
        if n_intact is not None:
            self.table.cut(n_intact)
        self.table.cut(self.restorable(self.table.n_committed))
        self.table.drop_live()
        self.trim()

    def fork(self, length: int) -> BlockStore:
        """Return another sequence that shares the blocks of the first `length` tokens."""
        length = self.restorable(length)
        recurrent = None if self.recurrent is None else self.recurrent.fork(length)
        other = BlockStore(self._pool, recurrent)
        other.table.append(self.table.committed[:length])
        other._blocks = self._blocks[: blocks_of(length)]
        for block in other._blocks:
            self._pool.share(block)
        return other

    def trim(self) -> None:
        """Free blocks without a row, and states after the prefix if there are no nodes."""
        if self.recurrent is not None and not len(self.table):
            self.recurrent.rollback(self.table.n_committed)
        n_blocks = blocks_of(self.table.num_tokens)
        while len(self._blocks) > n_blocks:
            self._pool.give_back(self._blocks.pop())

    def check_integrity(self) -> None:
        """Raise RuntimeError if the blocks do not hold all rows of the table."""
        if len(self._blocks) < blocks_of(self.table.num_tokens):
            raise RuntimeError(
                f"{len(self._blocks)} blocks do not hold the sequence's "
                f"{self.table.num_tokens} tokens"
            )

    def close(self) -> None:
        self.table.rollback(0)  # the ids of nodes are never used twice
        self.trim()

    def _select(self, prefix: int, order: list[int]) -> None:
        """Keep the prefix and these live rows, moved into this order."""
        if self.recurrent is not None:
            self.recurrent.select(prefix, order)
        new = np.arange(len(order))
        moved = np.flatnonzero(np.array(order, dtype=np.int64) != new)
        if len(moved):
            first = prefix + int(moved[0])
            old_rows = prefix + np.array(order, dtype=np.int64)[moved[0] :]
            with self._naming_itself():
                self._pool.make_writable(self._blocks[first // BLOCK_SIZE :])
            sources = rows_in_pool(self.places, old_rows)
            targets = rows_in_pool(self.places, np.arange(first, prefix + len(order)))
            self._pool.copy_rows(sources, targets)
        self.trim()
