"""Layers in order, read ahead of their use, over and over.

    with streamer.layer(i) as tensors:      # blocks until layer i is in memory
        compute(tensors)                    # name -> raw bytes, resident and streamed alike
                                            # leaving releases the slot to the readers

The readers share the chunks of one layer, so that it arrives as soon as possible, and go on to the
next without a barrier. After the last layer they wrap around: while the caller drafts and samples,
the ring fills with the first layers of the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from offload.placement.placement import LayerWeights
from offload.ring.background import BackgroundReads, by_need
from offload.ring.cursor import AcquiredSlot, StreamStats
from offload.ring.file_source import RingOptions, file_cursor
from offload.ring.pinning_access import PinningAccess
from offload.ring.slots import StreamerClosed
from offload.storage.aligned import AlignedBuffer, HostMemory, buffer_bytes
from offload.storage.direct_io import DirectFile, OpenStorage
from offload.storage.layout import make_layout
from offload.storage.reading import (
    DEFAULT_N_READERS,
    DEFAULT_READ_BYTES,
    ResidentWeights,
    load_resident,
    resident_footprint,
)
from offload.units import Progress

__all__ = [
    "ResidentWeights",
    "StreamStats",
    "StreamerClosed",
    "WeightStreamer",
    "load_resident",
    "resident_footprint",
]


class WeightStreamer(PinningAccess[HostMemory, dict[str, memoryview]]):
    """The weights of all layers: resident ones in memory, the others through a ring of slots.

    Args:
        layers: in the order of use; some may be wholly resident.
        n_slots: depth of the ring, 1 (no overlap) or more, at most the number of streamed layers.
        read_bytes: maximum size of one read, a multiple of 4096; small layers get smaller ones.
        n_readers: threads that read.
        storage: opens a file for reading; tests pass one that injects faults.
        progress: (bytes done, bytes in total) while the resident tensors are read, which the first
            pass need not wait for; called by the threads that read.
        poison: overwrite released slots, for tests.

    Raises:
        StorageError: a file cannot be opened.
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
        options = RingOptions(n_slots, read_bytes, n_readers, storage, poison)
        reads = options.plan([layer.layout for layer in self._layers])
        self._slot_bytes = max((layer.slot_bytes for layer in self._layers), default=0)
        records = {r.name: r for layer in self._layers for r in layer.resident_records}
        layout = make_layout(records.values(), merge_gap=0)
        self._resident = resident = ResidentWeights(layout)
        try:
            background = BackgroundReads(
                by_need(layout.pieces(read_bytes), self._layers),
                len(self._layers),
                resident.fetch,
                progress=progress,
                n_readers=n_readers,
                storage=storage,
            )
            super().__init__(file_cursor(reads, options, self._slot_bytes, background=background))
        except BaseException:
            resident.close()
            raise

    @property
    def resident_bytes(self) -> int:
        """Memory of the resident tensors."""
        return self._resident.n_bytes

    @property
    def ring_bytes(self) -> int:
        """Memory of the ring."""
        return self._cursor.n_slots * buffer_bytes(self._slot_bytes)

    def _acquire(
        self, index: int, acquired_slot: AcquiredSlot[HostMemory] | None
    ) -> dict[str, memoryview]:
        layer = self._layers[index]
        memory = acquired_slot.slot.buffer if acquired_slot else self._cursor.pinned.get(index)
        views = layer.layout.views(memory.view if memory else memoryview(b""))
        return {
            record.name: views[record.name] if record.name in views else self._resident[record.name]
            for record in layer.tensors
        }

    def _new_slot(self) -> HostMemory:
        # Committed at once: the memory of a pinned layer is measured before a read fills this.
        return AlignedBuffer(self._slot_bytes, in_children=False)

    def _free(self) -> None:
        self._resident.close()
