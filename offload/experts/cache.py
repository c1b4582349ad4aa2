"""A cache of experts: a pass asks for those of one layer and gets each when it is in memory.

Slots have the size of one expert, in one piece of memory. A slot contains what was read, as it is
in the file (O_DIRECT, no copies): a tensor begins where it does there, modulo ALIGNMENT. Cached
experts are handed out first, while the missing ones are read: all at once, as far as there are
slots for them, in the order of the file.

A pass may ask for more experts than there are slots: those that it has used can be evicted.
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
    """Return whether a pass that asks a layer for `n_asked` experts has one token. The tokens of a
    pass share experts, mostly cached ones: of many tokens' experts a larger part is missed."""
    return n_asked == experts.n_used < len(experts.tensors)


class ExpertCache:
    """Experts of one model, for one forward pass at a time.

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
            # Committed at once: slots that fill later would look like memory that is free.
            self._memory = AlignedBuffer(expert_cache.n_bytes, in_children=False)
        except BaseException:
            self._readers.close()
            raise
        self._left: deque[tuple[int, _Read]] = deque()
        """(layer, read) of accesses that were given up."""

    @property
    def stats(self) -> ExpertStats:
        return self._readers.stats

    def fetch(
        self, layer: int, experts: Collection[int], check: Check | None = None
    ) -> Generator[tuple[int, tuple[memoryview, ...]], None, None]:
        """Yield each of a layer's `experts` once, in any order, with its tensors' bytes, which are
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
        """Get a slot in the index; see ExpertIndex.admit."""
        return self._directory.admit(layer, expert, cached)

    def leave(self, layer: int, reads: Collection[_Read]) -> None:
        """Abandon these reads. A read may never end (a dead network mount): the next access waits
        for it, before its slot is used again."""
        self._left += [(layer, read) for read in reads]

    def _forget_left(self, check: Check | None) -> None:
        """Wait for abandoned reads, and forget experts that were not read completely."""
        while self._left:
            layer, read = self._left[0]
            self._readers.wait_for(read.begun, check)
            if not read.is_whole():
                self._directory.forget(layer, read.expert)
            self._left.popleft()

    def stall_for(self, layer: int, item: _Read, check: Check | None) -> None:
        """Wait until an expert has been read."""
        self._readers.stall_for(item.begun, layer, check)

    def read(self, layer: int, expert: int, slot: int, begun: list[Future[Failure]]) -> int:
        """Begin to read an expert into a slot; return the number of reads.

        begun: receives the reads, one by one.
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
        self._readers.check_open()  # closing has freed the memory
        experts, view = self._experts(layer), self._slot(slot)
        places = (experts.layouts[expert].tensors[r.name] for r in experts.tensors[expert])
        return tuple(view[start : start + n_bytes] for start, n_bytes in places)

    def stop(self) -> None:
        """End a waiting pass with an error."""
        self._readers.stop()

    def close(self) -> None:
        """Free threads, files and memory. Idempotent."""
        if self._readers.close():
            self._memory.close()


@dataclass
class _Read:
    """The reads of one expert into its slot."""

    expert: int
    slot: int
    begun: list[Future[Failure]] = field(default_factory=list)
    n_reads: int | None = None
    """Total number of reads; None until all of them have begun."""

    def is_whole(self) -> bool:
        """Return whether all reads succeeded, once they have ended."""
        return self.n_reads == len(self.begun) and all(map(_is_well, self.begun))


def _is_well(read: Future[Failure]) -> bool:
    return not read.cancelled() and read.exception() is None and read.result() is None


class _Reads:
    """Missing experts of one access of a layer: read in order, as slots become free.

    cached: experts of the layer that are still to be handed out.
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
        """Begin as many reads as there are slots for."""
        while self._missing:
            slot = self._cache.admit(self._layer, self._missing[0], self._retained)
            if slot is None:
                return
            read = _Read(self._missing.popleft(), slot)
            self._running.append(read)
            read.n_reads = self._cache.read(self._layer, read.expert, slot, read.begun)

    def release(self, expert: int) -> None:
        """Let the expert be evicted, and begin further reads."""
        self._retained.discard(expert)
        self.start()

    def next(self, check: Check | None) -> tuple[int, int]:
        """Return (expert, slot) of the next one, as soon as it is read."""
        read = self._running[0]
        self._cache.stall_for(self._layer, read, check)
        self._running.popleft()
        return read.expert, read.slot

    def close(self) -> None:
        """Abandon the reads that still run."""
        for read in self._running:
            for part in read.begun:
                part.cancel()
        self._cache.leave(self._layer, self._running)
        self._running.clear()
