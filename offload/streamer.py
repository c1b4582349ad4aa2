"""Layers in order, read ahead of their use, over and over.

    with streamer.layer(i) as tensors:      # blocks until layer i is in memory
        compute(tensors)                    # name -> raw bytes, resident and streamed alike
                                            # leaving gives the slot back to the readers

The readers share the pieces of one layer, so that it arrives as soon as possible, and go on to the
next without a barrier. After the last layer they wrap around: while the caller drafts and samples,
the ring fills with the first layers of the next pass.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

from offload.direct_io import DirectFile, OpenStorage
from offload.plan import LayerWeights
from offload.reading import (
    DEFAULT_N_READERS,
    DEFAULT_READ_BYTES,
    OpenFiles,
    Progress,
    ReaderThreads,
    ResidentWeights,
    load_resident,
    resident_footprint,
    shared_read_bytes,
)
from offload.slots import Slot, SlotRing, StreamerClosed

__all__ = [
    "ResidentWeights",
    "StreamStats",
    "StreamerClosed",
    "WeightStreamer",
    "load_resident",
    "resident_footprint",
]

logger = logging.getLogger(__name__)

_JOIN_SECONDS = 10.0  # a read that hangs longer (a dead network mount) is left behind


@dataclass(frozen=True)
class StreamStats:
    """Cumulative figures; subtract two snapshots for those of a span."""

    bytes_read: int = 0  # by the ring, alignment included; resident tensors do not count
    stall_seconds: float = 0.0  # the caller waited in `layer` for storage
    read_seconds: float = 0.0  # at least one read was running
    passes: int = 0  # the last layer was left

    def __sub__(self, earlier: StreamStats) -> StreamStats:
        return StreamStats(
            **{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)}
        )


@dataclass(frozen=True)
class _Lease:
    """A slot lent to the caller for the time of one layer."""

    slot: Slot
    ticket: int


class WeightStreamer:
    """The weights of all layers, the resident part in memory, the rest through a ring of slots.

    One thread at a time walks the layers; `close` may be called by another one.

    Args:
        layers: in the order of use; some may be wholly resident.
        n_slots: depth of the ring, 1 (no overlap) or more; more than streamed layers are not made.
        read_bytes: size of one read at most, a multiple of 4096; small layers get smaller ones.
        n_readers: threads that read.
        storage: opens a file for reading; tests pass one that injects faults.
        progress: (bytes done, bytes in total) while the resident tensors are read.
        poison: overwrite released slots, for tests.

    Raises:
        StorageError: a file cannot be opened or a resident tensor cannot be read.
    """

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        n_slots: int,
        *,
        read_bytes: int = DEFAULT_READ_BYTES,
        n_readers: int = DEFAULT_N_READERS,
        storage: OpenStorage = DirectFile,
        progress: Progress | None = None,
        poison: bool = False,
    ) -> None:
        self._layers = tuple(layers)
        self._streamed = [i for i, layer in enumerate(self._layers) if layer.layout.extents]
        if n_readers < 1 or (self._streamed and n_slots < 1):
            raise ValueError(f"streaming needs a slot and a reader, not {n_slots} and {n_readers}")
        self._pieces = []
        for layout in (self._layers[i].layout for i in self._streamed):
            self._pieces.append(
                layout.pieces(shared_read_bytes(layout.n_bytes, n_readers, read_bytes))
            )
        # The layer that continues the walk; None after an error or an interrupt, and all the while
        # that one of these may leave things half done.
        self._expected: int | None = 0
        self._ticket = 0  # of the next streamed layer in the walk
        self._leases: list[_Lease] = []
        self._stall_seconds = 0.0
        self._passes = 0
        self._closed = self._is_freed = False
        records = {r.name: r for layer in self._layers for r in layer.resident_records}
        self._resident = load_resident(
            records.values(), progress, read_bytes=read_bytes, n_readers=n_readers, storage=storage
        )
        self._ring: SlotRing | None = None
        if self._streamed:
            self._start_ring(min(n_slots, len(self._streamed)), n_readers, storage, poison)

    @contextmanager
    def layer(self, index: int) -> Iterator[Mapping[str, memoryview]]:
        """The raw bytes of each tensor of layer `index`, in its file's byte order and layout.

        They are valid inside the with-block only: afterwards the slot holds another layer. Layers
        are asked for in cyclic order; any other request (a pass that was given up and begins anew)
        costs what was read ahead. Ctrl-C interrupts the wait.

        Raises:
            StorageError: the layer could not be read, or (at the last layer of a pass) a file
                changed under the pass. The streamer can be used again; it then reads anew.
            StreamerClosed: it was closed.
        """
        lease = self._acquire(index)
        try:
            yield self._tensors(index, lease)
        finally:
            self._release(lease)
        if index == len(self._layers) - 1:
            self._passes += 1

    def restart(self) -> None:
        """Begin again at layer 0, as after a pass that was given up.

        Slots still lent are taken back, by what the ring says: an interrupt may have come between
        its doing and ours. Nothing is read anew where layer 0 is the next one anyway. When this is
        interrupted itself, call it again.
        """
        is_lending = self._ring is not None and self._ring.is_lending
        if self._expected != 0 or self._leases or is_lending:
            self._expected = None
            self._leases.clear()
            self._resume_at(0)

    @property
    def stats(self) -> StreamStats:
        bytes_read, read_seconds = self._ring.reading_figures() if self._ring else (0, 0.0)
        return StreamStats(bytes_read, self._stall_seconds, read_seconds, self._passes)

    @property
    def n_slots(self) -> int:
        return len(self._ring.slots) if self._ring else 0

    @property
    def resident_bytes(self) -> int:
        """Memory of the resident tensors."""
        return self._resident.n_bytes

    @property
    def ring_bytes(self) -> int:
        """Memory of the ring."""
        return self._ring.n_bytes if self._ring else 0

    def close(self) -> None:
        """Stop the readers and give the memory back; a caller that waits gets StreamerClosed."""
        self._closed = True
        if self._is_freed:
            return
        if self._ring is not None:
            self._ring.close()
            if not self._readers.join(_JOIN_SECONDS):
                # Their files and buffers are in use: leaking them is the lesser evil.
                logger.warning("a read from storage does not return; its memory is not given back")
                self._is_freed = True
                return
            self._ring.free_buffers()
            self._files.close()
        self._resident.close()
        self._is_freed = True

    def __enter__(self) -> WeightStreamer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- parts -----------------------------------------------------------------------------

    def _start_ring(self, n_slots: int, n_readers: int, storage: OpenStorage, poison: bool) -> None:
        pieces = self._pieces
        paths = (piece.path for layer in pieces for piece in layer)
        slot_bytes = max(self._layers[i].layout.n_bytes for i in self._streamed)
        try:
            self._files = OpenFiles(paths, storage)
            self._ring = SlotRing(
                n_slots, slot_bytes, lambda ticket: pieces[ticket % len(pieces)], poison=poison
            )
        except BaseException:
            self._resident.close()
            raise
        self._readers = ReaderThreads(self._ring, self._files, n_readers)
        weakref.finalize(self, self._ring.close)

    def _acquire(self, index: int) -> _Lease | None:
        if not 0 <= index < len(self._layers):
            raise IndexError(f"there is no layer {index} among {len(self._layers)}")
        if self._closed:
            raise StreamerClosed("the weight streamer is closed; load the model again")
        if index != self._expected:
            if self._leases:
                raise RuntimeError(f"layer {index} was asked for out of order inside another layer")
            self._resume_at(index)
        self._expected = None
        lease = self._wait_for(index)
        self._expected = (index + 1) % len(self._layers)
        return lease

    def _wait_for(self, index: int) -> _Lease | None:
        lease = None
        layout = self._layers[index].layout
        if layout.extents and self._ring is not None:
            started = time.perf_counter()
            try:
                slot = self._ring.wait_ready(self._ticket)
            finally:
                self._stall_seconds += time.perf_counter() - started
            lease = _Lease(slot, self._ticket)
            self._leases.append(lease)
            self._ticket += 1
        if self._ring is not None and index == len(self._layers) - 1:
            # At the end, because by then all bytes of the pass were read from an unchanged file.
            try:
                self._files.check_unchanged()
            except BaseException:
                self._release(lease)
                raise
        return lease

    def _tensors(self, index: int, lease: _Lease | None) -> dict[str, memoryview]:
        layer = self._layers[index]
        views = layer.layout.views(lease.slot.buffer.view if lease else memoryview(b""))
        return {
            record.name: views[record.name] if record.name in views else self._resident[record.name]
            for record in layer.tensors
        }

    def _release(self, lease: _Lease | None) -> None:
        if lease is not None and self._ring is not None:
            if lease in self._leases:
                self._leases.remove(lease)
            self._ring.release(lease.slot, lease.ticket)

    def _resume_at(self, index: int) -> None:
        """Let the readers begin at the first streamed layer from `index` on."""
        self._expected = None
        if self._ring is not None:
            n_streamed = len(self._streamed)
            position = sum(1 for i in self._streamed if i < index)
            # A ticket is never used twice, so that a late release cannot touch a later layer's
            # slot. The readers are at most n_slots (<= n_streamed) tickets ahead: two passes on is
            # unused.
            self._ticket = (self._ticket // n_streamed + 3) * n_streamed + position
            self._ring.restart(self._ticket)
        self._expected = index
