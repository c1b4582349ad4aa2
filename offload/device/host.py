"""The host's tier of a model on a device: pinned memory that the device copies from by itself.

Of each layer that is not wholly on the device, some tensors may be pinned for good, others pass
through the slots of a pinned ring, the same ring as for every streamed model. Only that here a slot
is released while copies from it may still be running: it is freed behind a fence, and the reader
that fills it next waits for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from offload.device.engine import CopyEngine
from offload.placement.placement import LayerWeights
from offload.ring.cursor import AcquiredSlot
from offload.ring.file_source import RingOptions, file_cursor
from offload.ring.layer_access import LayerAccess
from offload.storage.aligned import HostMemory
from offload.storage.direct_io import DirectFile, OpenStorage
from offload.storage.reading import (
    DEFAULT_N_READERS,
    DEFAULT_READ_BYTES,
    ResidentWeights,
    load_resident,
)
from offload.units import Progress


class Part(NamedTuple):
    """Pinned bytes, and their offset in a device slot."""

    source: memoryview
    offset: int


class HostTier(LayerAccess[HostMemory, tuple[Part, ...]]):
    """The layers that are copied to a device, in the order of use, again and again.

    Copies that the caller enqueues inside the with-block of a layer may run on after it.

    Args:
        layers: only those with tensors outside the device.
        n_slots: slots of the pinned ring, at most the number of streamed layers.
        read_bytes, n_readers, storage, progress: as for WeightStreamer.

    Raises:
        StorageError: a file cannot be opened or a pinned tensor cannot be read.
        MemoryError: the memory cannot be pinned.
    """

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        n_slots: int,
        engine: CopyEngine,
        *,
        read_bytes: int = DEFAULT_READ_BYTES,
        n_readers: int = DEFAULT_N_READERS,
        storage: OpenStorage = DirectFile,
        progress: Progress | None = None,
    ) -> None:
        self._layers = tuple(layers)
        options = RingOptions(n_slots, read_bytes, n_readers, storage)
        reads = options.plan([layer.layout for layer in self._layers])
        self._pinned: list[ResidentWeights] = []
        try:
            for layer, layer_progress in zip(
                self._layers, _stages(self._layers, progress), strict=True
            ):
                self._pinned.append(
                    load_resident(
                        layer.resident_records,
                        layer_progress,
                        read_bytes=read_bytes,
                        n_readers=n_readers,
                        storage=storage,
                        allocate=engine.allocate_pinned,
                    )
                )
            slot_bytes = max((layer.slot_bytes for layer in self._layers), default=0)
            super().__init__(
                file_cursor(
                    reads,
                    options,
                    slot_bytes,
                    allocate=engine.allocate_pinned,
                    make_fence=engine.record_copy,
                )
            )
        except BaseException:
            self._free()
            raise

    def _acquire(
        self, index: int, acquired_slot: AcquiredSlot[HostMemory] | None
    ) -> tuple[Part, ...]:
        layer, parts = self._layers[index], []
        if acquired_slot is not None:
            parts.append(Part(acquired_slot.slot.buffer.view[: layer.slot_bytes], 0))
        if layer.resident_layout.n_bytes:
            pinned = self._pinned[index].memory[: layer.resident_layout.n_bytes]
            parts.append(Part(pinned, layer.slot_bytes))
        return tuple(parts)

    def _free(self) -> None:
        for weights in self._pinned:
            weights.close()


def _stages(layers: Sequence[LayerWeights], progress: Progress | None) -> list[Progress | None]:
    """Return a progress callback for each layer, which all add up to `progress`."""
    if progress is None:
        return [None] * len(layers)
    sizes = [sum(p.n_needed for p in layer.resident_layout.extents) for layer in layers]

    def following(n_before: int) -> Progress:
        return lambda n_done, _: progress(n_before + n_done, sum(sizes))

    return [following(sum(sizes[:i])) for i in range(len(sizes))]
