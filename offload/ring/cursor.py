"""The cursor over the layers: which read belongs to which layer, and when a pass is complete.

Shared by `WeightStreamer` (weights in slots), `Pager` (weights at mapped addresses) and
`DeviceStreamer` (weights in slots on a device). Layers are visited one after another, cyclically:

    cursor.begin_layer(i)    layer i is next; if another was expected, reads start over
    slot = cursor.acquire(i) waits for its slot; None if nothing of it streams
    cursor.mark_ready(i)     checks the files for changes; layer i + 1 is expected next
    ...
    cursor.release(slot)     the readers may fill the slot again
    cursor.end_layer(i)      after the last layer a pass is complete

From `seek` to `reach` the cursor counts as interrupted: after an error there, the next `seek`
begins anew.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Generic, Protocol

from offload.ring.background import BackgroundReads
from offload.ring.order import ReadOrder
from offload.ring.slots import JOIN_SECONDS, Check, MemoryT, Slot, SlotRing, StreamerClosed
from offload.storage.direct_io import StorageError
from offload.trace import WAIT, record_since


@dataclass(frozen=True)
class StreamStats:
    """Cumulative metrics; subtract two snapshots for those of a span."""

    bytes_read: int = 0  # by the ring, alignment included; resident tensors do not count
    stall_seconds: float = 0.0  # the caller waited in `layer` for storage, or for a copy
    read_seconds: float = 0.0  # at least one read was running
    passes: int = 0  # the last layer was left
    bytes_copied: int = 0  # to a device, once the copies were enqueued
    copy_stall_seconds: float = 0.0  # a device waited for a layer, without computing

    def __sub__(self, earlier: StreamStats) -> StreamStats:
        return StreamStats(
            **{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)}
        )


@dataclass(frozen=True)
class AcquiredSlot(Generic[MemoryT]):
    """A slot with the streamed part of one layer."""

    slot: Slot[MemoryT]
    read_number: int


class LayerSource(Protocol[MemoryT]):
    """A producer that fills the ring of a cursor: its threads, and the source of the bytes."""

    @property
    def ring(self) -> SlotRing[MemoryT, Any]:
        """The ring; `order` says which layer each read sequence number is for."""

    @property
    def order(self) -> ReadOrder:
        """The order of the layers that stream."""

    def check_unchanged(self) -> None:
        """Raise StorageError if a file has changed since the layers so far were read from it."""

    def join(self, timeout_seconds: float) -> bool:
        """After the ring was closed: wait for the threads; return False if one still hangs."""

    def free(self) -> None:
        """Free memory and files, when no thread is running."""


class LayerCursor(Generic[MemoryT]):
    """The ring, its source, and the caller's position in the cycle of layers.

    Args:
        streams: whether something of each layer comes through the ring, in the order of use.
        source: fills the ring; None if nothing streams.
        background: reads what stays in memory; `acquire` waits for it, too.
    """

    def __init__(
        self,
        streams: Sequence[bool],
        source: LayerSource[MemoryT] | None,
        background: BackgroundReads | None = None,
    ) -> None:
        self._n_layers = len(streams)
        self._streamed = [index for index, is_streamed in enumerate(streams) if is_streamed]
        # The layer that continues the pass; None after an error, and during operations that may
        # fail halfway.
        self._expected: int | None = 0
        self._read_number = 0  # of the next streamed layer
        self._has_restarted = False  # no layer was waited for since `restart_at`
        self._stall_seconds = 0.0
        self._passes, self._is_last_in = 0, False
        self._is_closed = False
        self._source = source
        self._ring = None if source is None else source.ring
        self._background = background
        self.pinned: dict[int, MemoryT] = {}
        """Memory of pinned layers, by layer."""
        if self._ring is not None:
            # Ends the threads of a cursor that is no longer referred to.
            weakref.finalize(self, _close_in, os.getpid(), self._ring)
        if background is not None:
            weakref.finalize(self, _close_in, os.getpid(), background)

    @property
    def stats(self) -> StreamStats:
        bytes_read, read_seconds = self._ring.read_stats() if self._ring else (0, 0.0)
        return StreamStats(bytes_read, self._stall_seconds, read_seconds, self._passes)

    @property
    def unread_bytes(self) -> int:
        """Bytes that stay in memory, but have not been read yet."""
        return 0 if self._background is None else self._background.unread_bytes

    @property
    def n_slots(self) -> int:
        return len(self._ring.slots) if self._ring else 0

    @property
    def is_at_start(self) -> bool:
        """Whether layer 0 is the next one, and no slot is acquired."""
        return self._expected == 0 and not (self._ring and self._ring.has_slot_in_use)

    def check(self, index: int) -> None:
        """Raise IndexError for a layer that does not exist, StreamerClosed after `close`."""
        if not 0 <= index < self._n_layers:
            raise IndexError(f"there is no layer {index} among {self._n_layers}")
        if self._is_closed:
            raise StreamerClosed("the weight streamer is closed; load the model again")

    def begin_layer(self, index: int, *, is_inside: bool) -> None:
        """Make `index` the next layer; inside another layer it must be the expected one.

        Retry once if a read failed after `restart_at`: no caller has seen that error yet, and it
        may have passed. A failure of a later layer counts as well, since the pass will get there.
        """
        if index != self._expected:
            if is_inside:
                raise RuntimeError(f"layer {index} was asked for out of order inside another layer")
            self.restart_at(index)
        elif self._failed_since_restart(index):
            self.restart_at(index)
        self._expected = None  # the next steps may fail

    def _failed_since_restart(self, index: int) -> bool:
        """Return whether storage has failed since `restart_at`, without a caller waiting for it."""
        if self._ring is None or not self._has_restarted or not self._is_read(index):
            return False
        return isinstance(self._ring.failure, StorageError)  # other errors are permanent

    def acquire(self, index: int, check: Check | None = None) -> AcquiredSlot[MemoryT] | None:
        """Wait until layer `index` is read, and take its slot; None if nothing of it streams.

        check: see SlotRing.wait_ready.
        """
        if self._background is not None and not self._background.is_over:
            with self._stalled(index):
                self._background.wait(index, check)
        if self._ring is None or not self._is_read(index):
            return None
        self._has_restarted = False
        with self._stalled(index):
            slot = self._ring.wait_ready(self._read_number, check)
        acquired_slot = AcquiredSlot(slot, self._read_number)
        self._read_number += 1
        return acquired_slot

    @contextmanager
    def _stalled(self, index: int) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._stall_seconds += record_since(started, WAIT, f"wait for layer {index}")

    def mark_ready(self, index: int) -> None:
        """Mark layer `index` as in place.

        Raises StorageError at the last layer of a pass if a file changed, and StreamerClosed if
        `close` came first and closed the files.
        """
        is_last = index == self._n_layers - 1
        if is_last and self._source is not None:
            # At the end, because by then all bytes of the pass were read from an unchanged file.
            try:
                self._source.check_unchanged()
            except StorageError:
                self.check(index)
                raise
        self._expected = (index + 1) % self._n_layers
        self._is_last_in |= is_last

    def release(self, acquired_slot: AcquiredSlot[MemoryT]) -> None:
        """Release the slot to the readers; does nothing if a restart already did."""
        if self._ring is not None:
            self._ring.release(acquired_slot.slot, acquired_slot.read_number)

    def end_layer(self, index: int) -> None:
        """Leave layer `index`; after the last one a pass is complete."""
        if index == self._n_layers - 1 and self._is_last_in:
            self._is_last_in = False
            self._passes += 1

    def abort_pass(self) -> None:
        """Abandon the current pass: the next `begin_layer` or `restart_at` starts over."""
        self._expected, self._is_last_in = None, False

    def restart_at(self, index: int) -> None:
        """Let the readers begin at the first streamed layer from `index` on; releases all slots."""
        self.abort_pass()
        if self._ring is not None:
            assert self._source is not None
            # A read number is never used twice, so that a late release cannot touch a later layer's
            # slot. The readers are at most n_slots numbers ahead.
            self._read_number += self.n_slots + 1
            with self._ring.lock:
                self._source.order.begin_at(self._read_number, self._position(index))
                self._ring.restart(self._read_number)
            self._has_restarted = True
        self._expected = index

    def pin(self, index: int, acquired_slot: AcquiredSlot[MemoryT], other: MemoryT) -> bool:
        """Pin acquired layer `index` in its memory, and let the ring go on with `other`.

        Returns False, and does nothing, if a restart already released the slot. Raises ValueError
        if too few layers would stream.
        """
        assert self._ring is not None
        assert self._source is not None
        order = self._source.order
        with self._ring.lock:
            order.pin(self._position(index))
            memory = self._ring.exchange(acquired_slot.slot, acquired_slot.read_number, other)
            if memory is None:
                order.unpin(self._position(index))
                return False
        self.pinned[index] = memory
        return True

    def unpin(self, index: int) -> MemoryT:
        """Unpin layer `index` and return its memory; the layer streams again. Call `restart_at`."""
        assert self._source is not None
        with self._source.ring.lock:
            self._source.order.unpin(self._position(index))
        self.abort_pass()
        return self.pinned.pop(index)

    def chosen(self, n_layers: int) -> frozenset[int]:
        """Return `n_layers` streamed layers to pin, evenly spaced, or as many as may be pinned."""
        if self._source is None:
            return frozenset()
        return frozenset(self._streamed[at] for at in self._source.order.chosen(n_layers))

    def _is_read(self, index: int) -> bool:
        """Return whether layer `index` comes through the ring."""
        return index in self._streamed and index not in self.pinned

    def _position(self, index: int) -> int:
        """Return the position, among streamed layers, of the first one from `index` on."""
        return sum(1 for i in self._streamed if i < index)

    def close(self) -> bool:
        """Stop the readers; waiting callers get StreamerClosed. Return False if a read hangs."""
        self._is_closed = True
        readers = [reader for reader in (self._background, self._source) if reader is not None]
        if self._ring is not None:
            self._ring.close()
        if self._background is not None:
            self._background.close()
        have_ended = [reader.join(JOIN_SECONDS) for reader in readers]
        return all(have_ended)

    def free(self) -> None:
        """Free the memory of the ring, once `close` has returned True."""
        while self.pinned:
            self.pinned.popitem()[1].close()
        if self._source is not None:
            self._source.free()


def _close_in(process_id: int, readers: SlotRing[Any, Any] | BackgroundReads) -> None:
    """Close the readers, but not in a forked process: it has no threads to end, and the lock may be
    held for ever."""
    if os.getpid() == process_id:
        readers.close()
