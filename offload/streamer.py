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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from offload.direct_io import DirectFile, OpenStorage
from offload.plan import LayerWeights
from offload.reading import (
    DEFAULT_N_READERS,
    DEFAULT_READ_BYTES,
    Progress,
    ResidentWeights,
    load_resident,
    resident_footprint,
)
from offload.slots import StreamerClosed
from offload.trace import LAYER, record_since
from offload.walk import LayerWalk, RingOptions, StreamStats, Taken

__all__ = [
    "ResidentWeights",
    "StreamStats",
    "StreamerClosed",
    "WeightStreamer",
    "load_resident",
    "resident_footprint",
]

logger = logging.getLogger(__name__)


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
        layouts = [layer.layout for layer in self._layers if layer.layout.extents]
        options = RingOptions(n_slots, read_bytes, n_readers, storage, poison)
        reads = options.plan([x.layout if x.layout.extents else None for x in self._layers])
        self._leases: list[Taken] = []
        self._is_freed = False
        records = {r.name: r for layer in self._layers for r in layer.resident_records}
        self._resident = load_resident(
            records.values(), progress, read_bytes=read_bytes, n_readers=n_readers, storage=storage
        )
        try:
            self._walk = LayerWalk(reads, options, max((x.n_bytes for x in layouts), default=0))
        except BaseException:
            self._resident.close()
            raise

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
        entered = time.perf_counter()
        try:
            yield self._tensors(index, lease)
        finally:
            self._release(lease)
            record_since(entered, LAYER, f"layer {index}")
        self._walk.leave(index)

    def restart(self) -> None:
        """Begin again at layer 0, as after a pass that was given up.

        Slots still lent are taken back, by what the ring says: an interrupt may have come between
        its doing and ours. Nothing is read anew where layer 0 is the next one anyway. When this is
        interrupted itself, call it again.
        """
        if self._leases or not self._walk.is_at_start:
            self._walk.break_off()
            self._leases.clear()
            self._walk.resume_at(0)

    @property
    def stats(self) -> StreamStats:
        return self._walk.stats

    @property
    def n_slots(self) -> int:
        return self._walk.n_slots

    @property
    def resident_bytes(self) -> int:
        """Memory of the resident tensors."""
        return self._resident.n_bytes

    @property
    def ring_bytes(self) -> int:
        """Memory of the ring."""
        return self._walk.ring_bytes

    def close(self) -> None:
        """Stop the readers and give the memory back; a caller that waits gets StreamerClosed."""
        if self._is_freed:
            return
        if not self._walk.close():
            # Their files and buffers are in use: leaking them is the lesser evil.
            logger.warning("a read from storage does not return; its memory is not given back")
            self._is_freed = True
            return
        self._walk.free()
        self._resident.close()
        self._is_freed = True

    def __enter__(self) -> WeightStreamer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- parts -----------------------------------------------------------------------------

    def _acquire(self, index: int) -> Taken | None:
        self._walk.check(index)
        self._walk.seek(index, is_inside=bool(self._leases))
        lease = self._walk.take(index)
        if lease is not None:
            self._leases.append(lease)
        try:
            self._walk.arrive(index)
        except BaseException:
            self._release(lease)
            raise
        return lease

    def _tensors(self, index: int, lease: Taken | None) -> dict[str, memoryview]:
        layer = self._layers[index]
        views = layer.layout.views(lease.slot.buffer.view if lease else memoryview(b""))
        return {
            record.name: views[record.name] if record.name in views else self._resident[record.name]
            for record in layer.tensors
        }

    def _release(self, lease: Taken | None) -> None:
        if lease is not None:
            if lease in self._leases:
                self._leases.remove(lease)
            self._walk.give_back(lease)
