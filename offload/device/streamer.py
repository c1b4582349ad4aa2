"""Layers on a device in order, copied ahead of their use, over and over.

    with streamer.layer(i) as tensors:      # name -> bytes on the device
        enqueue(tensors)                    # computations; they begin when the layer has arrived

The block may end long before the computations do. Between passes the slots fill with the first
layers of the next one, as far as the enqueued computations allow.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from offload.device.engine import CopyEngine, Event
from offload.device.host import HostTier
from offload.device.loading import load_on_device
from offload.device.source import CopySource, DeviceSlot
from offload.placement.placement import Placement
from offload.ring.cursor import AcquiredSlot, LayerCursor, StreamStats
from offload.ring.layer_access import AcquiredLayer, LayerAccess
from offload.ring.slots import Check
from offload.storage.direct_io import DirectFile, OpenStorage
from offload.storage.reading import DEFAULT_N_READERS, DEFAULT_READ_BYTES
from offload.units import Progress

logger = logging.getLogger(__name__)


class DeviceStreamer(LayerAccess[DeviceSlot, Mapping[str, Any]]):
    """The weights of all layers: on the device, or copied there through a ring of slots.

    Args:
        plan: the placement of each tensor, and the number of slots.
        engine: copy engine of the device.
        read_bytes, n_readers, storage: as for WeightStreamer.
        progress: (bytes done, bytes in total) while tensors are read that stay on the device, and
            again while those are read that stay pinned.

    Raises:
        StorageError: a file cannot be opened, or a resident tensor cannot be read.
        BudgetExceeded, MemoryError: the memory of the device, or of the host, cannot be had.
    """

    def __init__(
        self,
        plan: Placement,
        engine: CopyEngine,
        *,
        read_bytes: int = DEFAULT_READ_BYTES,
        n_readers: int = DEFAULT_N_READERS,
        storage: OpenStorage = DirectFile,
        progress: Progress | None = None,
    ) -> None:
        self._plan, self._engine = plan, engine
        self._stalls = _Stalls()
        self._host: HostTier | None = None
        source = None
        # First the tensors that stay on the device: once there, they take no pinned memory.
        records = {r.name: r for layer in plan.layers for r in layer.device_records}
        self._resident = load_on_device(
            records.values(), engine, progress, n_readers=n_readers, storage=storage
        )
        try:
            copied = [layer for layer in plan.layers if layer.copied_bytes]
            if copied:
                self._host = host = HostTier(
                    copied,
                    plan.n_slots,
                    engine,
                    read_bytes=read_bytes,
                    n_readers=n_readers,
                    storage=storage,
                    progress=progress,
                )
                source = CopySource(
                    host, engine, len(copied), plan.n_device_slots, plan.device_slot_bytes
                )
        except BaseException:
            if self._host is not None:
                self._host.close()
            self._resident.close()
            raise
        super().__init__(LayerCursor([layer.copied_bytes > 0 for layer in plan.layers], source))

    @property
    def stats(self) -> StreamStats:
        cursor = self._cursor.stats
        return replace(
            cursor if self._host is None else self._host.stats,
            stall_seconds=cursor.stall_seconds,
            passes=cursor.passes,
            bytes_copied=cursor.bytes_read,
            copy_stall_seconds=self._stalls.seconds(),
        )

    def _enter(
        self, index: int, check: Check | None
    ) -> tuple[AcquiredLayer[DeviceSlot], Mapping[str, Any]]:
        self._before = self._engine.record_compute()
        return super()._enter(index, check)

    def _acquire(
        self, index: int, acquired_slot: AcquiredSlot[DeviceSlot] | None
    ) -> Mapping[str, Any]:
        layer = self._plan.layers[index]
        if acquired_slot is None:
            return {record.name: self._not_copied(record.name) for record in layer.tensors}
        slot = acquired_slot.slot.buffer
        assert slot.arrived is not None, "a slot is ready once its copies are enqueued"
        self._engine.compute_waits(slot.arrived)
        self._stalls.add(self._before, self._engine.record_compute())
        places = layer.device_slot_offsets
        return {
            record.name: slot.buffer.part(*places[record.name])
            if record.name in places
            else self._resident[record.name]
            for record in layer.tensors
        }

    def _not_copied(self, name: str) -> Any:
        """Return a tensor of a layer without copied ones: on the device, or without bytes."""
        return self._resident[name] if name in self._resident else self._resident.buffer.part(0, 0)

    def _free(self) -> None:
        try:
            self._engine.synchronize()
        except Exception as error:  # a caller that waited for a result got the error as well
            logger.warning("the device failed: %s", error)
        self._resident.close()


class _Stalls:
    """Seconds for which the computation stream stalled between pairs of its events."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # another thread may read the metrics
        self._open: deque[tuple[Event, Event]] = deque()
        self._seconds = 0.0

    def add(self, before: Event, after: Event) -> None:
        self.seconds()  # drops events that are done
        self._open.append((before, after))

    def seconds(self) -> float:
        """Return the total of all pairs that have passed by now."""
        with self._lock:
            while self._open and self._open[0][1].is_done():
                before, after = self._open.popleft()
                self._seconds += after.seconds_after(before)
            return self._seconds
