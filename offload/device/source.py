"""Layers copied from the host's tier into slots on a device: the source of the device's ring.

It is the ring that files are read into, one level up: one thread takes a layer's parts in the host,
enqueues their copies and goes on to the next; the layer counts as ready once they are enqueued. The
host does not wait for the device where the device can wait by itself:

    a slot's copies begin after its fence     the computations that used the layer before
    computations begin after slot.arrived     the copies (DeviceStreamer ensures it)
    reads into a pinned slot begin after its fence, the copies from it (the host's tier ensures it)
"""

from __future__ import annotations

import threading

from offload.device.engine import CopyEngine, DeviceBuffer, Event
from offload.device.host import HostTier
from offload.ring.order import ReadOrder
from offload.ring.slots import SlotRing, Work


class DeviceSlot:
    """Memory of the device for one layer."""

    def __init__(self, buffer: DeviceBuffer) -> None:
        self.buffer = buffer
        self.arrived: Event | None = None
        """Event after the copies of the slot's current or next layer."""

    def close(self) -> None:
        self.buffer.close()


class CopySource:
    """A ring of device slots and the thread that fills them from `host`, which it closes.

    Args:
        n_layers: number of layers in `host`.
        slot_bytes: size of the largest layer.

    Raises:
        BudgetExceeded: the device has not enough memory.
    """

    def __init__(
        self, host: HostTier, engine: CopyEngine, n_layers: int, n_slots: int, slot_bytes: int
    ) -> None:
        self._host = host
        slots: list[DeviceSlot] = []
        try:
            while len(slots) < n_slots:
                slots.append(DeviceSlot(engine.allocate_device(slot_bytes)))
            self.order = order = ReadOrder(n_layers, n_slots)
            self.ring: SlotRing[DeviceSlot, int] = SlotRing(
                slots,
                lambda read_number: (order.position(read_number),),
                make_fence=engine.record_compute,
            )
            self._thread = threading.Thread(
                target=_copy_until_closed,
                args=(self.ring, host, engine),
                name="specdec-copier",
                daemon=True,
            )
            self._thread.start()
        except BaseException:
            for slot in slots:
                slot.close()
            raise

    def check_unchanged(self) -> None:
        """Do nothing: the host's tier checks at its last layer, before that one is copied."""

    def join(self, timeout_seconds: float) -> bool:
        has_ended = self._host.stop()
        self._thread.join(timeout_seconds)
        return has_ended and not self._thread.is_alive()

    def free(self) -> None:
        """Free the memory of both tiers. Nothing enqueued may still use it."""
        self.ring.free_buffers()
        self._host.close()


def _copy_until_closed(ring: SlotRing[DeviceSlot, int], host: HostTier, engine: CopyEngine) -> None:
    while (work := ring.acquire_for_read()) is not None:
        try:
            n_bytes = _copy_layer(work, host, engine)
        except BaseException as error:  # whatever it is, the consumer must learn of it
            ring.publish(work, error=error)
        else:
            ring.publish(work, n_bytes)


def _copy_layer(work: Work[DeviceSlot, int], host: HostTier, engine: CopyEngine) -> int:
    """Enqueue the copies of one layer; return their bytes."""
    slot, n_bytes = work.slot.buffer, 0
    if slot.arrived is not None:
        # Else the whole pass would be enqueued at once, and a cancel come too late for it. Costs
        # nothing: the slot's next copy cannot begin before, and the other slots' go on meanwhile.
        slot.arrived.wait()
    with host.layer(work.read_chunk) as parts:
        if work.slot.fence is not None:
            engine.copy_waits(work.slot.fence)
        for part in parts:
            engine.copy(part.source, slot.buffer, part.offset)
            n_bytes += len(part.source)
        slot.arrived = engine.record_copy()
    return n_bytes
