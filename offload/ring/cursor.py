"""The walk over the layers: which read belongs to which layer, and when a pass is whole.

What `WeightStreamer` (weights in slots), `Pager` (weights at mapped addresses) and `DeviceStreamer`
(weights in slots on a device) have in common.
One layer after another is visited, cyclically:

    walk.seek(i)           layer i is wanted next; where another was expected, reads begin anew
    taken = walk.take(i)   waits for its slot; None where nothing of it streams
    walk.arrive(i)         the files are those that were opened; layer i + 1 is expected next
    ...
    walk.give_back(taken)  the readers may fill the slot again
    walk.leave(i)          after the last layer a pass is complete

From `seek` to `arrive` the walk counts as broken off: where it fails there, the next `seek` begins
anew.
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
    """Cumulative figures; subtract two snapshots for those of a span."""

    bytes_read: int = 0  # by the ring, alignment included; resident tensors do not count
    stall_seconds: float = 0.0  # the caller waited in `layer` for storage, or for a copy
    read_seconds: float = 0.0  # at least one read was running
    passes: int = 0  # the last layer was left
    bytes_copied: int = 0  # to a device, once the copies were enqueued
    copy_stall_seconds: float = 0.0  # a device computed nothing, for want of a layer

    def __sub__(self, earlier: StreamStats) -> StreamStats:
        return StreamStats(
            **{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)}
        )


@dataclass(frozen=True)
class Taken(Generic[MemoryT]):
    """A slot with the streamed part of one layer."""

    slot: Slot[MemoryT]
    read_number: int


class Supply(Protocol[MemoryT]):
    """What fills the ring of a walk: its threads, and where they have the bytes from."""

    @property
    def ring(self) -> SlotRing[MemoryT, Any]:
        """Its tickets are for the layers that `order` says."""

    @property
    def order(self) -> ReadOrder:
        """Of the layers that stream."""

    def check_unchanged(self) -> None:
        """Raise StorageError when what was brought so far is of a file that has changed since."""

    def join(self, timeout_seconds: float) -> bool:
        """After the ring was closed: wait for the threads; False when one still hangs."""

    def free(self) -> None:
        """Give memory and files back, when no thread is running."""


class LayerCursor(Generic[MemoryT]):
    """The ring, who fills it, and where in the cycle of layers the caller is.

    Args:
        streams: whether something of each layer comes through the ring, in the order of use.
        supply: of the ring; None where nothing streams.
        background: reads what stays in memory; a layer is waited for there, too.
    """

    def __init__(
        self,
        streams: Sequence[bool],
        supply: Supply[MemoryT] | None,
        background: BackgroundReads | None = None,
    ) -> None:
        self._n_layers = len(streams)
        self._streamed = [index for index, is_streamed in enumerate(streams) if is_streamed]
        # The layer that continues the walk; None after an error, and all the while that one may
        # leave things half done.
        self._expected: int | None = 0
        self._read_number = 0  # of the next streamed layer in the walk
        self._is_anew = False  # nobody has waited for a layer since `resume_at`
        self._stall_seconds = 0.0
        self._passes, self._is_last_in = 0, False
        self._is_closed = False
        self._supply = supply
        self._ring = None if supply is None else supply.ring
        self._background = background
        self.pinned: dict[int, MemoryT] = {}
        """Memory of layers that would stream, and stay after their use."""
        if self._ring is not None:
            # Ends the threads of a walk that nobody refers to any more.
            weakref.finalize(self, _close_in, os.getpid(), self._ring)
        if background is not None:
            weakref.finalize(self, _close_in, os.getpid(), background)

    @property
    def stats(self) -> StreamStats:
        bytes_read, read_seconds = self._ring.reading_figures() if self._ring else (0, 0.0)
        return StreamStats(bytes_read, self._stall_seconds, read_seconds, self._passes)

    @property
    def unread_bytes(self) -> int:
        """Of what stays in memory, what has not been read yet."""
        return 0 if self._background is None else self._background.unread_bytes

    @property
    def n_slots(self) -> int:
        return len(self._ring.slots) if self._ring else 0

    @property
    def is_at_start(self) -> bool:
        """Whether layer 0 is the next one, and no slot is lent."""
        return self._expected == 0 and not (self._ring and self._ring.is_pinning)

    def check(self, index: int) -> None:
        """Raise IndexError for a layer that there is not, StreamerClosed after `close`."""
        if not 0 <= index < self._n_layers:
            raise IndexError(f"there is no layer {index} among {self._n_layers}")
        if self._is_closed:
            raise StreamerClosed("the weight streamer is closed; load the model again")

    def seek(self, index: int, *, is_inside: bool) -> None:
        """Layer `index` is wanted next; `is_inside` of another layer only in order.

        Where storage failed again after `resume_at`, it is read once more: that may be long ago,
        and the error that led to `resume_at` was raised already. Be it for a later layer: that
        one's turn comes in the same pass.
        """
        if index != self._expected:
            if is_inside:
                raise RuntimeError(f"layer {index} was asked for out of order inside another layer")
            self.resume_at(index)
        elif self._failed_anew(index):
            self.resume_at(index)
        self._expected = None  # what follows may fail

    def _failed_anew(self, index: int) -> bool:
        """Whether storage has failed since `resume_at`, and nobody waited for it so far."""
        if self._ring is None or not self._is_anew or not self._is_read(index):
            return False
        return isinstance(self._ring.failure, StorageError)  # others do not pass

    def take(self, index: int, check: Check | None = None) -> Taken[MemoryT] | None:
        """Wait until layer `index` is there, and take its slot; None where nothing of it streams.

        check: see SlotRing.wait_ready.
        """
        if self._background is not None and not self._background.is_over:
            with self._stalled(index):
                self._background.wait(index, check)
        if self._ring is None or not self._is_read(index):
            return None
        self._is_anew = False
        with self._stalled(index):
            slot = self._ring.wait_ready(self._read_number, check)
        taken = Taken(slot, self._read_number)
        self._read_number += 1
        return taken

    @contextmanager
    def _stalled(self, index: int) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._stall_seconds += record_since(started, WAIT, f"wait for layer {index}")

    def reach(self, index: int) -> None:
        """Layer `index` is in place.

        Raises StorageError for a changed file, at the last layer of a pass, and StreamerClosed
        where `close` came between and the files are gone for that.
        """
        is_last = index == self._n_layers - 1
        if is_last and self._supply is not None:
            # At the end, because by then all bytes of the pass were read from an unchanged file.
            try:
                self._supply.check_unchanged()
            except StorageError:
                self.check(index)
                raise
        self._expected = (index + 1) % self._n_layers
        self._is_last_in |= is_last

    def give_back(self, taken: Taken[MemoryT]) -> None:
        """Let the readers fill the slot; nothing happens where a restart already did."""
        if self._ring is not None:
            self._ring.release(taken.slot, taken.read_number)

    def leave(self, index: int) -> None:
        """The caller is done with layer `index`; after the last one a pass is complete."""
        if index == self._n_layers - 1 and self._is_last_in:
            self._is_last_in = False
            self._passes += 1

    def break_off(self) -> None:
        """Whatever was going on is over: the next `seek` or `resume_at` begins anew."""
        self._expected, self._is_last_in = None, False

    def resume_at(self, index: int) -> None:
        """Let the readers begin at the first streamed layer from `index` on; nothing is lent."""
        self.break_off()
        if self._ring is not None:
            assert self._supply is not None
            # A ticket is never used twice, so that a late release cannot touch a later layer's
            # slot. The readers are at most n_slots tickets ahead.
            self._read_number += self.n_slots + 1
            with self._ring.lock:
                self._supply.order.begin_at(self._read_number, self._position(index))
                self._ring.restart(self._read_number)
            self._is_anew = True
        self._expected = index

    def pin_layers(self, index: int, taken: Taken[MemoryT], other: MemoryT) -> bool:
        """Keep the memory of layer `index`, which is lent, and let the ring go on with `other`.

        False, and nothing happens, where a restart already took it back. Raises ValueError where
        too few layers would stream.
        """
        assert self._ring is not None
        assert self._supply is not None
        order = self._supply.order
        with self._ring.lock:
            order.pin_layers(self._position(index))
            memory = self._ring.exchange(taken.slot, taken.read_number, other)
            if memory is None:
                order.let_go(self._position(index))
                return False
        self.pinned[index] = memory
        return True

    def let_go(self, index: int) -> MemoryT:
        """Layer `index`, which was held, streams again; its memory. `resume_at` comes next."""
        assert self._supply is not None
        with self._supply.ring.lock:
            self._supply.order.let_go(self._position(index))
        self.break_off()
        return self.pinned.pop(index)

    def chosen(self, n_layers: int) -> frozenset[int]:
        """So many of the layers that stream, in even distances, or as many as may be held."""
        if self._supply is None:
            return frozenset()
        return frozenset(self._streamed[at] for at in self._supply.order.chosen(n_layers))

    def _is_read(self, index: int) -> bool:
        """Whether layer `index` comes through the ring."""
        return index in self._streamed and index not in self.pinned

    def _position(self, index: int) -> int:
        """Of the first layer that streams from `index` on, among all that do."""
        return sum(1 for i in self._streamed if i < index)

    def close(self) -> bool:
        """Stop the readers; a caller that waits gets StreamerClosed. False: a read still hangs."""
        self._is_closed = True
        readers = [item for item in (self._background, self._supply) if item is not None]
        if self._ring is not None:
            self._ring.close()
        if self._background is not None:
            self._background.close()
        have_ended = [reader.join(JOIN_SECONDS) for reader in readers]
        return all(have_ended)

    def free(self) -> None:
        """Give the memory of the ring back, once `close` has said that no reader is running."""
        while self.pinned:
            self.pinned.popitem()[1].close()
        if self._supply is not None:
            self._supply.free()


def _close_in(process_id: int, readers: SlotRing[Any, Any] | BackgroundReads) -> None:
    """In a fork there are no threads to end, and one of them may hold the lock for ever."""
    if os.getpid() == process_id:
        readers.close()
