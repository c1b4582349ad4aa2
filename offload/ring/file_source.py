"""Layers read from files into a ring of host memory, for the cursors of streamer and pager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from offload.ring.background import BackgroundReads
from offload.ring.cursor import LayerCursor
from offload.ring.order import ReadOrder
from offload.ring.readers import ReaderThreads, fill_ring
from offload.ring.slots import JOIN_SECONDS, Fence, SlotRing, poison_memory
from offload.storage.aligned import AlignedBuffer, HostMemory
from offload.storage.direct_io import OpenStorage
from offload.storage.layout import Layout, ReadChunk
from offload.storage.reading import OpenFiles, shared_read_bytes


@dataclass(frozen=True)
class RingOptions:
    """Options of reading the streamed part of the layers.

    n_slots: depth of the ring, 1 (no overlap) or more, at most the number of streamed layers.
    read_bytes: maximum size of one read, a multiple of 4096; small layers get smaller ones.
    n_readers: threads that read.
    storage: opens a file for reading; tests pass one that injects faults.
    poison: overwrite released slots, for tests.
    """

    n_slots: int
    read_bytes: int
    n_readers: int
    storage: OpenStorage
    poison: bool = False

    def plan(self, layouts: Sequence[Layout]) -> list[tuple[ReadChunk, ...]]:
        """Return the reads of each layer; none if nothing of it streams.

        Raises ValueError for options that could not work.
        """
        streams = any(layout.extents for layout in layouts)
        if self.n_readers < 1 or (streams and self.n_slots < 1):
            raise ValueError(
                f"streaming needs a slot and a reader, not {self.n_slots} and {self.n_readers}"
            )
        return [self._pieces(layout) for layout in layouts]

    def _pieces(self, layout: Layout) -> tuple[ReadChunk, ...]:
        shared = shared_read_bytes(layout.n_bytes, self.n_readers, self.read_bytes)
        return layout.pieces(shared)


class FileLayerSource:
    """Open files, and threads that read them into a ring.

    Args:
        reads: reads of each layer that streams, in the order of use, as `options.plan` made them.
        slot_bytes: size of the largest layer; rounded up as `allocate` needs it.
        allocate: makes the memory of one slot from its size; None: an AlignedBuffer.
        make_fence: see SlotRing; the readers wait for it.

    Raises:
        StorageError: a file cannot be opened.
        MemoryError: the memory cannot be had.
        SpecdecError: a thread cannot be started.
    """

    def __init__(
        self,
        reads: Sequence[tuple[ReadChunk, ...]],
        options: RingOptions,
        slot_bytes: int,
        *,
        allocate: Callable[[int], HostMemory] | None = None,
        make_fence: Callable[[], Fence] | None = None,
    ) -> None:
        paths = (read_chunk.path for layer in reads for read_chunk in layer)
        self._files = OpenFiles(paths, options.storage)
        try:
            make = allocate or _uncommitted_slot
            slots = [make(slot_bytes) for _ in range(min(options.n_slots, len(reads)))]
            self.order = order = ReadOrder(len(reads), len(slots))
            self.ring: SlotRing[HostMemory, ReadChunk] = SlotRing(
                slots,
                lambda read_number: reads[order.position(read_number)],
                make_fence=make_fence,
                poison=poison_memory if options.poison and make_fence is None else None,
            )
        except BaseException:
            self._files.close()
            raise
        self._readers = ReaderThreads("specdec-reader", options.n_readers)
        try:
            self._readers.start(partial(fill_ring, self.ring, self._files))
        except BaseException:
            self.ring.close()
            if self.join(JOIN_SECONDS):
                self.free()
            raise

    def check_unchanged(self) -> None:
        self._files.check_unchanged()

    def join(self, timeout_seconds: float) -> bool:
        return self._readers.join(timeout_seconds)

    def free(self) -> None:
        self.ring.free_buffers()
        self._files.close()


def _uncommitted_slot(n_bytes: int) -> HostMemory:
    """Return memory that forked processes do not get. The readers commit it, with the first read of
    each page."""
    return AlignedBuffer(n_bytes, is_committed=False, in_children=False)


def file_cursor(
    reads: Sequence[tuple[ReadChunk, ...]],
    options: RingOptions,
    slot_bytes: int,
    *,
    allocate: Callable[[int], HostMemory] | None = None,
    make_fence: Callable[[], Fence] | None = None,
    background: BackgroundReads | None = None,
) -> LayerCursor[HostMemory]:
    """Return a cursor over layers that are read from files; see FileLayerSource.

    reads: those of all layers.
    background: closed if this raises.
    """
    streamed = [pieces for pieces in reads if pieces]
    source = None
    try:
        if streamed:
            source = FileLayerSource(
                streamed, options, slot_bytes, allocate=allocate, make_fence=make_fence
            )
    except BaseException:
        if background is not None:
            background.close()
            background.join(JOIN_SECONDS)
        raise
    return LayerCursor([bool(pieces) for pieces in reads], source, background)
