"""TieredPool: a KV pool that holds more blocks than memory; the cold ones are in a file.

A block is hot, in memory for all layers, or cold, in the file for all layers. Its *place* is its
number among the hot ones, or behind them that among the cold ones. A pass reads the cold blocks of
its sequences once, layer by layer (staging.py), for all their nodes.

- The newest blocks are hot. Before they run out, the oldest full block of the sequence with the
  most hot blocks is written to the file, in the background, and its memory is used again.
- A prompt that is longer than the hot blocks begins in cold blocks, which the pass itself writes.
- Rows are written to hot blocks, or to cold ones that the same pass has begun: a cold block is read
  back before it is changed, after a rollback or a fork.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from backends.attention.batch import BLOCK_SIZE, BatchLayout
from backends.attention.stored_rows import OWN_FORMATS, KvFormats
from backends.contract.backend import BackendError, KvFileError
from backends.kv.block_file import BlockFile
from backends.kv.block_mover import BlockMover
from backends.kv.pool import BlockTable, KvPool, no_check
from backends.kv.slots import BlockSlots
from backends.kv.staging import Staging, wait_for
from backends.kv.tier_sizes import Tiers
from offload.ring.slots import Check
from offload.storage.direct_io import StorageError

_SHORT_SHARE = 4
"""A sequence that grows by up to this part of the hot blocks gets hot ones: those of longer
sequences are written to the file for it."""


@dataclass
class _Spill:
    """A hot block that is being written to a cold one."""

    cold: int
    job: Future[None]


class TieredPool(KvPool):
    """The blocks of all layers; see KvPool.

    Args:
        token_bytes: bytes of a token's keys and values, for each layer.

    Raises:
        StorageError: the file cannot be made.
    """

    def __init__(
        self,
        n_blocks: int,
        token_bytes: Sequence[int],
        tiers: Tiers,
        formats: KvFormats = OWN_FORMATS,
    ) -> None:
        n_layers = len(token_bytes)
        without_kv = [i for i, n in enumerate(token_bytes) if not n]
        super().__init__(n_layers, n_blocks, without_kv, formats, tiers.n_hot)
        n_cold = tiers.n_cold(n_blocks)
        self._n_hot, self._n_kept_free = tiers.n_hot, tiers.n_kept_free
        self._ids, self._cold = BlockSlots(n_blocks), BlockSlots(n_cold)
        self._places = np.full(n_blocks, -1, dtype=np.int64)
        self._staged = {
            layer: i for i, layer in enumerate(x for x in range(n_layers) if x not in without_kv)
        }
        self._file = BlockFile(tiers.folder, [n for n in token_bytes if n], n_cold)
        layers = {i: self.layers[layer] for layer, i in self._staged.items()}
        self._mover, self._staging = BlockMover(self._file, layers), Staging(self._file, n_cold)
        self._new_cold: set[int] = set()
        """Cold blocks that have no content in the file yet."""
        self._spills: dict[int, _Spill] = {}
        self._of_pass: frozenset[BlockTable] = frozenset()
        self._is_staging = self._is_closed = False

    # --- sizes -----------------------------------------------------------------------------------

    @property
    def n_touched(self) -> int:
        return self._hot.n_touched + self._cold.n_used

    @property
    def n_free(self) -> int:
        return self._ids.n_free

    @property
    def n_bytes(self) -> int:
        return super().n_bytes + self._staging.n_bytes

    @property
    def n_hot(self) -> int:
        return self._n_hot

    @property
    def cold_bytes(self) -> int:
        return self._cold.n_used * sum(self._file.block_bytes)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes read from the file and bytes written to it."""
        return self._file.traffic

    @property
    def stall_seconds(self) -> float:
        return self._staging.stall_seconds

    def growth_bytes(self, n_new: int, block_bytes: int) -> int:
        n_used = min(n_new + self._ids.n_used, self.n_blocks)
        n_hot = min(n_used, self._n_hot) - self._hot.n_touched
        # At most: all of the new ones may begin in the file.
        n_cold = min(self._cold.n_slots, self._cold.n_used + n_new)
        growth = max(0, self._staging.bytes_of(n_cold) - self._staging.n_bytes)
        return max(0, n_hot) * block_bytes + growth

    def release_unused(self) -> None:
        super().release_unused()
        if not self._cold.n_used:
            self._staging.release_above(0)

    # --- blocks ----------------------------------------------------------------------------------

    def places(self, blocks: Sequence[int]) -> np.ndarray:
        places: np.ndarray = self._places[np.array(blocks, dtype=np.int64)]
        return places

    def take_many(self, n: int) -> list[int]:
        """See KvPool; the last ones are hot. Raises KvFileError if memory must be made by writing
        others to the file, and that fails."""
        if not n:
            return []
        self._check_free(n)
        self._reuse_written()
        n_hot = max(
            self._n_kept_free, self._hot.n_free - self._n_kept_free, self._n_hot // _SHORT_SHARE
        )
        self._make_hot_slots(min(n, n_hot))
        n_cold = min(n - min(n, n_hot, self._hot.n_free), self._cold.n_free)
        return [self._new_block(is_cold=i < n_cold) for i in range(n)]

    def own_copy(self, block: int) -> int:
        self._reuse_written()
        self._make_hot_slots(1)
        self._check_hot_slot()
        other = self._new_block(is_cold=False)
        source, target = int(self._places[block]), int(self._places[other])
        try:
            if source >= self._n_hot:
                self._read_block(source - self._n_hot, target)
            else:
                for layer in self.layers:
                    layer.copy_block(source, target)
        except BaseException:
            self.give_back(other)
            raise
        self.give_back(block)
        return other

    def make_writable(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._cancel_spill(block)
            place = int(self._places[block])
            if place < self._n_hot or block in self._new_cold:
                continue
            self._reuse_written()
            self._make_hot_slots(1, but=blocks)
            self._check_hot_slot()
            slot = self._hot.take()
            try:
                self._read_block(place - self._n_hot, slot)
            except BaseException:
                self._hot.give_back(slot)
                raise
            self._cold.give_back(place - self._n_hot)
            self._places[block] = slot

    def _new_block(self, *, is_cold: bool) -> int:
        block = self._begin_use(self._ids.take())
        if is_cold:
            self._places[block] = self._n_hot + self._cold.take()
            self._new_cold.add(block)
        else:
            self._places[block] = self._hot.take()
        return block

    def _end_use(self, block: int) -> None:
        self._cancel_spill(block)
        place = int(self._places[block])
        if place < self._n_hot:
            self._hot.give_back(place)
        else:
            self._cold.give_back(place - self._n_hot)
        self._new_cold.discard(block)
        self._places[block] = -1
        self._ids.give_back(block)

    def _check_hot_slot(self) -> None:
        if not self._hot.n_free:
            raise BackendError(
                f"the KV cache has {self._n_hot * BLOCK_SIZE} tokens of memory, all of which are "
                "ends of sequences: run fewer at a time (--parallel), or raise the budget"
            )

    # --- from memory to the file -----------------------------------------------------------------

    def _make_hot_slots(self, n: int, but: Collection[int] = ()) -> None:
        """Write hot blocks to the file until `n` hot ones are free, as far as there are any.

        Raises KvFileError if that fails and fewer are free.
        """
        while self._hot.n_free < n:
            if not self._spills and not self._spill(but):
                return
            block, spill = next(iter(self._spills.items()))
            self._finish_spill(block, spill)

    def _spill(self, but: Collection[int] = ()) -> bool:
        """Begin to write a hot block that no pass will change soon; return whether there is one.

        Sequences that were not in the last pass come first, then those with the most hot blocks;
        of each the oldest block. The end of a sequence is written if nothing else is left.
        """
        if not self._cold.n_free:
            return False
        stores = sorted(self.stores, key=lambda x: (x in self._of_pass, -len(self._full(x, but))))
        full = (block for store in stores for block in self._full(store, but))
        ends = (block for store in stores for block in self._end(store, but))
        block = next(full, None)
        block = next(ends, None) if block is None else block
        if block is None:
            return False
        hot, cold = int(self._places[block]), self._cold.take()
        job = self._staging.submit(lambda: self._mover.write(hot, cold))
        self._spills[block] = _Spill(cold, job)
        return True

    def _full(self, store: BlockTable, but: Collection[int]) -> list[int]:
        """Return the hot blocks of a sequence that are full of committed tokens."""
        full = store.blocks[: store.table.n_committed // BLOCK_SIZE]
        return [x for x in full if self._can_spill(x) and x not in but]

    def _end(self, store: BlockTable, but: Collection[int]) -> list[int]:
        """Return the last block of a sequence that is in no pass and has no nodes."""
        if store in self._of_pass or len(store.table):
            return []
        return [x for x in store.blocks[-1:] if self._can_spill(x) and x not in but]

    def _can_spill(self, block: int) -> bool:
        return self._places[block] < self._n_hot and block not in self._spills

    def _reuse_written(self) -> None:
        """Use the memory of blocks that have been written; one that could not be stays there."""
        for block, spill in list(self._spills.items()):
            if spill.job.done():
                with suppress(KvFileError, MemoryError):
                    self._finish_spill(block, spill)

    def _finish_spill(self, block: int, spill: _Spill) -> None:
        del self._spills[block]
        try:
            wait_for(spill.job, no_check)
        except BaseException as error:
            self._cold.give_back(spill.cold)
            if isinstance(error, StorageError):
                raise KvFileError(str(error)) from error
            raise
        self._hot.give_back(int(self._places[block]))
        self._places[block] = self._n_hot + spill.cold

    def _cancel_spill(self, block: int) -> None:
        spill = self._spills.pop(block, None)
        if spill is not None:
            if not spill.job.cancel():
                spill.job.exception()  # waits: it reads memory that is to change
            self._cold.give_back(spill.cold)

    def _read_block(self, cold: int, hot: int) -> None:
        try:
            self._mover.read(cold, hot)
        except StorageError as error:
            raise KvFileError(str(error)) from error

    # --- passes ----------------------------------------------------------------------------------

    def prepare(self, stores: Sequence[BlockTable]) -> None:
        self._of_pass = frozenset(stores)

    def begin(
        self,
        rows: np.ndarray,
        tables: Sequence[np.ndarray] = (),
        gathered: BatchLayout | None = None,
        check: Check = no_check,
    ) -> None:
        super().begin(rows, tables, gathered, check)
        cold = {int(x) - self._n_hot for table in tables for x in table if x >= self._n_hot}
        new = {int(self._places[block]) - self._n_hot for block in self._new_cold}
        self._staging.begin(cold - new, new, check)
        self._is_staging = bool(cold | new)

    @contextmanager
    def reading(self, layer: int, check: Check = no_check) -> Iterator[None]:
        i = self._staged.get(layer)
        if i is None or not self._is_staging:
            yield
            return
        with self._naming_stores():
            self.layers[layer].stage(self._staging.acquire(i, check))
        try:
            yield
        finally:
            self.layers[layer].stage(None)
        self._staging.release(i)

    def end(self, check: Check = no_check) -> None:
        with self._naming_stores():
            self._staging.end(check)
        self._new_cold.clear()
        self._reuse_written()
        while self._hot.n_free + len(self._spills) < self._n_kept_free and self._spill():
            pass

    def abandon(self) -> None:
        self._staging.abandon(no_check)

    @contextmanager
    def _naming_stores(self) -> Iterator[None]:
        """Add the sequences that have the cold blocks which an error names."""
        try:
            yield
        except KvFileError as error:
            places = {self._n_hot + x for x in error.blocks}
            error.stores = [x for x in self.stores if places & set(self.places(x.blocks).tolist())]
            raise

    # --- the end ---------------------------------------------------------------------------------

    def free(self) -> None:
        self.abandon()
        for block in list(self._spills):
            self._cancel_spill(block)
        super().free()
        for slots in (self._ids, self._cold):
            slots.clear()
        self._places[:] = -1
        self._new_cold.clear()
        self._staging.release_above(0)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.free()
            self._staging.close()
            self._file.close()
