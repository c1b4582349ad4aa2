"""A cache of experts: a pass asks for those of one layer and gets each when it is in memory.

Slots have the size of one expert, in one piece of memory. What a slot holds is what was read, as it
lies in the file (O_DIRECT, no copies): a tensor begins where it does there, modulo ALIGNMENT.
Experts that are there are handed out first, while those that are missing are read: all of them at
once, as far as there are slots for them, in the order of the file.

A pass may ask for more experts than there are slots: what it is through with makes room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from offload.experts.eviction import ExpertIndex, record_access
from offload.experts.readers import Check, ExpertReaders, ExpertStats, Failure
from offload.placement.experts import ExpertCachePlan, LayerExperts
from offload.storage.aligned import AlignedBuffer
from offload.storage.direct_io import DirectFile, OpenStorage


def is_of_one_row(n_asked: int, experts: LayerExperts) -> bool:
    """Whether a pass that asks a layer for so many experts has one row. Rows of one pass share
    experts, mostly those that are in memory: of what several ask for, a larger part is missed."""
    return n_asked == experts.n_used < len(experts.tensors)


class ExpertCache:
    """Experts of one model, for one pass at a time.

    Raises:
        StorageError: a file cannot be opened.
        MemoryError: the memory cannot be had.
    """

    def __init__(
        self,
        expert_cache: ExpertCachePlan,
        *,
        n_readers: int | None = None,
        storage: OpenStorage = DirectFile,
    ) -> None:
        self._capacity = expert_cache
        self._layers = expert_cache.layers
        self._last_layer = max(
            i for i, layer in enumerate(expert_cache.layers) if layer is not None
        )
        self._directory = ExpertIndex(expert_cache.n_slots)
        paths = (
            extent.path
            for layer in expert_cache.layers
            if layer is not None
            for layout in layer.layouts
            for extent in layout.extents
        )
        self._readers = ExpertReaders(paths, n_readers, storage)
        try:
            # Committed at once: slots that fill later would look like memory that can be lent.
            self._memory = AlignedBuffer(expert_cache.n_bytes, in_children=False)
        except BaseException:
            self._readers.close()
            raise
        self._left: deque[tuple[int, _Read]] = deque()
        """With their layers, of visits that were given up."""

    @property
    def stats(self) -> ExpertStats:
        return self._readers.stats

    def fetch(
        self, layer: int, experts: Collection[int], check: Check | None = None
    ) -> Generator[tuple[int, tuple[memoryview, ...]], None, None]:
        """Each of a layer's `experts` once, in any order, with the bytes of its tensors, which are
        valid until the next one is asked for. The iterator is to be exhausted or closed.

        Raises:
            StorageError: a read failed, or a file was changed.
            SpecdecError: the cache was closed.
        """
        self._readers.check_open()
        self._forget_left(check)
        self._directory.access(layer)
        record_access(layer, experts)
        here, missing = [], []
        for expert in experts:
            slot = self._directory.find(layer, expert)
            missing.append(expert) if slot is None else here.append((expert, slot))
        self.stats.n_asked += len(experts)
        self.stats.n_hits += len(here)
        if self._directory.is_full and is_of_one_row(len(experts), self._experts(layer)):
            self.stats.n_asked_full += len(experts)
            self.stats.n_hits_full += len(here)
        reads = _Reads(self, layer, {*experts}, deque(self._in_file_order(layer, missing)))
        try:
            reads.start()
            for expert, slot in here:
                yield expert, self._tensors(layer, expert, slot)
                reads.release(expert)
            while reads.has_more:
                expert, slot = reads.next(check)
                yield expert, self._tensors(layer, expert, slot)
                reads.release(expert)
            if layer == self._last_layer:  # by then all bytes of the pass were read
                self._readers.check_unchanged()
        finally:
            reads.close()

    def admit(self, layer: int, expert: int, cached: Collection[int]) -> int | None:
        """See Directory.admit."""
        return self._directory.admit(layer, expert, cached)

    def leave(self, layer: int, reads: Collection[_Read]) -> None:
        """Nobody waits for these any more. A read may never end (a dead network mount): the next
        visit waits for it, before its slot is used again."""
        self._left += [(layer, read) for read in reads]

    def _forget_left(self, check: Check | None) -> None:
        """What is not whole is not kept."""
        while self._left:
            layer, item = self._left[0]
            self._readers.wait_for(item.begun, check)
            if not item.is_whole():
                self._directory.forget(layer, item.expert)
            self._left.popleft()

    def stall_for(self, layer: int, item: _Read, check: Check | None) -> None:
        """Until an expert is there."""
        self._readers.stall_for(item.begun, layer, check)

    def read(self, layer: int, expert: int, slot: int, begun: list[Future[Failure]]) -> int:
        """Begin to read an expert into a slot; returns how many reads that takes.

        begun: gets them, one by one.
        """
        extents = self._experts(layer).layouts[expert].extents
        for extent in extents:
            begun.append(self._readers.begin(extent, partial(self._slot, slot)))
        return len(extents)

    def _in_file_order(self, layer: int, experts: Collection[int]) -> list[int]:
        layouts = self._experts(layer).layouts

        def place(expert: int) -> tuple[str, int]:
            first = layouts[expert].extents[0]
            return str(first.path), first.file_offset

        return sorted(experts, key=place)

    def _experts(self, layer: int) -> LayerExperts:
        result = self._layers[layer]
        assert result is not None, f"layer {layer} has no experts"
        return result

    def _slot(self, slot: int) -> memoryview:
        size = self._capacity.slot_bytes
        return self._memory.view[slot * size : (slot + 1) * size]

    def _tensors(self, layer: int, expert: int, slot: int) -> tuple[memoryview, ...]:
        self._readers.check_open()  # closing has given the memory back
        experts, view = self._experts(layer), self._slot(slot)
        places = (experts.layouts[expert].tensors[r.name] for r in experts.tensors[expert])
        return tuple(view[start : start + n_bytes] for start, n_bytes in places)

    def stop(self) -> None:
        """End a pass that waits, with an error."""
        self._readers.stop()

    def close(self) -> None:
        """Give threads, files and memory back. Idempotent."""
        if self._readers.close():
            self._memory.close()


@dataclass
class _Read:
    """Of an expert that is on its way to its slot."""

    expert: int
    slot: int
    begun: list[Future[Failure]] = field(default_factory=list)
    n_reads: int | None = None
    """None: not all of them are begun."""

    def is_whole(self) -> bool:
        """Once they have ended."""
        return self.n_reads == len(self.begun) and all(map(_is_well, self.begun))


def _is_well(read: Future[Failure]) -> bool:
    return not read.cancelled() and read.exception() is None and read.result() is None


class _Reads:
    """What one visit of a layer misses: read in order, as slots become free.

    kept: experts of the layer that are still to be handed out.
    """

    def __init__(
        self, cache: ExpertCache, layer: int, cached: set[int], missing: deque[int]
    ) -> None:
        self._cache, self._layer, self._retained, self._missing = cache, layer, cached, missing
        self._running: deque[_Read] = deque()

    @property
    def has_more(self) -> bool:
        return bool(self._missing or self._running)

    def start(self) -> None:
        """As many reads as there is room for."""
        while self._missing:
            slot = self._cache.admit(self._layer, self._missing[0], self._retained)
            if slot is None:
                return
            item = _Read(self._missing.popleft(), slot)
            self._running.append(item)
            item.n_reads = self._cache.read(self._layer, item.expert, slot, item.begun)

    def release(self, expert: int) -> None:
        """It is done with, and may make room."""
        self._retained.discard(expert)
        self.start()

    def next(self, check: Check | None) -> tuple[int, int]:
        """(expert, slot) of the next one, as soon as it is there."""
        item = self._running[0]
        self._cache.stall_for(self._layer, item, check)
        self._running.popleft()
        return item.expert, item.slot

    def close(self) -> None:
        """Give up what still runs."""
        for item in self._running:
            for read in item.begun:
                read.cancel()
        self._cache.leave(self._layer, self._running)
        self._running.clear()
