"""The pager's memory: slots whose pages can be moved out, and the mapping they are moved to."""

from __future__ import annotations

import errno
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

from offload.formats.tensors import TensorRecord
from offload.paging.address_space import (
    PROT_NONE,
    PROT_READ,
    PROT_READ_WRITE,
    AddressSpaceError,
    Move,
    commit,
    keep_from_children,
    move_pages,
    prepare,
    protect,
    reserve,
    stop_huge_pages,
    unmap,
    view,
)
from offload.paging.plan import PagingPlan, Part
from offload.placement.placement import LayerWeights
from offload.ring.background import BackgroundReads, by_need
from offload.storage.aligned import HUGE_PAGE_BYTES, populate
from offload.storage.direct_io import OpenStorage
from offload.storage.layout import Layout, ReadChunk
from offload.storage.reading import OpenFiles
from offload.units import Progress

_PROBE_BYTES = 16 * HUGE_PAGE_BYTES
_PROBES = 5


@cache
def move_seconds_per_byte() -> float:
    """Measure once per process what moving a layer's pages there and back takes, per byte.

    Raises AddressSpaceError where the system cannot move pages.
    """
    memory = PageMemory(_PROBE_BYTES, 0)
    memory.commit()
    reserved = reserve(_PROBE_BYTES + HUGE_PAGE_BYTES)
    try:
        target = -(-reserved // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        taken = []
        for _ in range(_PROBES):
            started = time.perf_counter()
            layer_mapping = LayerMapping((Move(memory.address, target, _PROBE_BYTES),))
            layer_mapping.acquire()
            layer_mapping.take_back()
            taken.append(time.perf_counter() - started)
        return statistics.median(taken) / _PROBE_BYTES
    finally:
        memory.close()
        unmap(reserved, _PROBE_BYTES + HUGE_PAGE_BYTES)


@contextmanager
def no_capacity_is_memory_error() -> Iterator[None]:
    """Turn a refusal for lack of memory or mappings into a MemoryError."""
    try:
        yield
    except AddressSpaceError as error:
        if error.errno == errno.ENOMEM:  # a limit of address space, or of mappings
            raise MemoryError(f"{error}; or raise vm.max_map_count") from error
        raise


class PageMemory:
    """The memory of one slot: `body_bytes` on huge pages, then `edge_bytes` on small ones.

    The first access to its view commits it: by a reader, while the model is being loaded. Forked
    processes do not share the content: it would be there twice once a reader writes to it.
    Raises MemoryError.
    """

    def __init__(self, body_bytes: int, edge_bytes: int) -> None:
        self._n_reserved = 0
        self._body_bytes, self._edge_bytes = body_bytes, edge_bytes
        self._n_bytes = body_bytes + edge_bytes
        self._is_committed = False
        self._committing = threading.Lock()
        n_reserved = self._n_bytes + HUGE_PAGE_BYTES
        with no_capacity_is_memory_error():
            self._reserved = reserve(n_reserved)
        self._n_reserved = n_reserved
        self.address = -(-self._reserved // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES

    @property
    def view(self) -> memoryview:
        """The slot's memory, valid while none of its pages are at a layer. Raises MemoryError."""
        self.commit()
        return view(self.address, self._n_bytes)

    def commit(self) -> None:
        """Back the whole slot with memory. Idempotent.

        Not left to the reads: what a first, smaller layer does not fill would get small pages.
        Raises MemoryError.
        """
        with self._committing, no_capacity_is_memory_error():
            if not self._is_committed:
                self._commit()
                self._is_committed = True

    def _commit(self) -> None:
        if self._body_bytes:
            commit(self.address, self._body_bytes)
        if self._edge_bytes:
            commit(self.address + self._body_bytes, self._edge_bytes, huge=False)
        if self._n_bytes:
            keep_from_children(self.address, self._n_bytes)

    def close(self) -> None:
        """Free the memory, except for pages that are at a layer."""
        if self._n_reserved:
            unmap(self._reserved, self._n_reserved)
            self._n_reserved = 0

    def __del__(self) -> None:
        self.close()


@dataclass
class LayerMapping:
    """Moves of a slot's pages to the addresses of a layer, and those that were made."""

    moves: tuple[Move, ...]  # from the slot to the layer
    _acquired: list[Move] = field(default_factory=list)

    @classmethod
    def of(cls, parts: Iterable[Part], slot_address: int) -> LayerMapping:
        return cls(tuple(Move(slot_address + p.slot_offset, p.address, p.n_bytes) for p in parts))

    def acquire(self) -> None:
        """Move the pages to the layer, for reading. Raises AddressSpaceError."""
        for move in self.moves:
            protect(move.source, move.n_bytes, PROT_NONE)
        move_pages(self.moves, self._acquired)
        for move in self.moves:
            protect(move.target, move.n_bytes, PROT_READ)

    def take_back(self) -> None:
        """Move acquired pages back to the slot, for writing. Raises AddressSpaceError."""
        for move in self.moves:
            protect(move.target, move.n_bytes, PROT_NONE)
        move_pages([Move(m.target, m.source, m.n_bytes) for m in self._acquired], [])
        self._acquired.clear()
        for move in self.moves:
            protect(move.source, move.n_bytes, PROT_READ_WRITE)


def read_resident(
    plan: PagingPlan,
    layers: Sequence[LayerWeights],
    other_tensors: Iterable[TensorRecord],
    progress: Progress | None,
    *,
    read_bytes: int,
    n_readers: int,
    storage: OpenStorage,
) -> BackgroundReads:
    """Replace the resident ranges' mapping with memory, and begin to read the file into it.

    other_tensors: non-layer tensors, resident or not.
    Errors: see Pager.
    """
    base = min((r.address for r in plan.resident), default=0)
    end = max((r.address + r.n_bytes for r in plan.resident), default=0)
    extents = tuple(
        ReadChunk(r.path, r.file_offset, r.address - base, r.n_bytes, r.n_needed)
        for r in plan.resident
    )
    for part in plan.resident:
        reserve(part.n_bytes, part.address)
        prepare(part.address, part.n_bytes)

    def fetch(files: OpenFiles, read_chunk: ReadChunk) -> None:
        populate(base + read_chunk.buffer_offset, read_chunk.n_bytes)
        files.read(read_chunk, view(base, end - base))

    def finish() -> None:
        for part in plan.resident:
            stop_huge_pages(part.address, part.n_bytes)
            protect(part.address, part.n_bytes, PROT_READ)

    return BackgroundReads(
        by_need(Layout(extents, {}, end - base).pieces(read_bytes), layers, other_tensors),
        len(layers),
        fetch,
        finish=finish,
        progress=progress,
        n_readers=n_readers,
        storage=storage,
    )


def reserve_streamed(plan: PagingPlan) -> None:
    """Replace the mapping of the layers with reserved address space."""
    for layer in plan.layers:
        for part in layer.parts:
            reserve(part.n_bytes, part.address)


def reserve_all(plan: PagingPlan) -> None:
    """Free all memory at the plan's addresses; they remain reserved."""
    for part in plan.resident:
        reserve(part.n_bytes, part.address)
    reserve_streamed(plan)
