"""The ring: a few buffers that all streamed layers pass through, each in turn.

A *ticket* counts the layer reads since the start (0, 1, 2, ...), over all passes: ticket t is read
into slot t % n_slots, whatever the number of layers, so that a ring depth that does not divide it
is nothing special. A slot goes FREE -> READING -> READY -> IN_USE -> FREE:

    readers    acquire_for_read() -> Work; publish(work)   (READY after its last piece)
    consumer   wait_ready(ticket) -> Slot; release(slot)

`restart(ticket)` drops all that was read ahead. Reads that are still running then belong to an old
*generation*: their result is ignored, and their slot is not filled again before they have ended.
One lock guards everything; it is held for microseconds and never during a read.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from offload.direct_io import AlignedBuffer, buffer_bytes
from offload.errors import SpecdecError
from offload.layout import Piece

# A signal that arrives between Python's check for signals and the wait itself interrupts nothing;
# waking up now and then bounds how long a Ctrl-C may go unnoticed.
_WAKE_SECONDS = 0.1


class StreamerClosed(SpecdecError):
    """The streamer was closed while, or before, a layer was asked for."""


class SlotState(enum.Enum):
    FREE = enum.auto()
    READING = enum.auto()
    READY = enum.auto()
    IN_USE = enum.auto()


class SlotMemory(Protocol):
    """What a slot reads into: an AlignedBuffer, or memory of the same members."""

    address: int

    @property
    def view(self) -> memoryview: ...

    def close(self) -> None: ...


@dataclass
class Slot:
    """One buffer of the ring and what is in it."""

    index: int
    buffer: SlotMemory
    state: SlotState = SlotState.FREE
    ticket: int = -1  # the layer read that the content belongs to
    n_missing: int = 0  # pieces of the ticket that have not arrived yet
    n_in_flight: int = 0  # reads into the buffer that are running, of any generation


@dataclass(frozen=True)
class Work:
    """One piece to read into one slot."""

    slot: Slot
    piece: Piece
    ticket: int
    generation: int


class SlotRing:
    """`n_slots` buffers of `slot_bytes`, allocated once.

    Args:
        pieces_of: the reads of a ticket, at least one.
        allocate: makes the memory of one slot from its size in bytes; None: an AlignedBuffer.
        poison: overwrite a slot with 0xFF (NaN in every float format) when it is released, so that
            a test sees a stale view at once.
    """

    def __init__(
        self,
        n_slots: int,
        slot_bytes: int,
        pieces_of: Callable[[int], Sequence[Piece]],
        *,
        allocate: Callable[[int], SlotMemory] | None = None,
        poison: bool = False,
    ) -> None:
        allocate = allocate or AlignedBuffer
        self.slots = tuple(Slot(index, allocate(slot_bytes)) for index in range(n_slots))
        self.n_bytes = n_slots * buffer_bytes(slot_bytes)  # memory of all buffers
        self._pieces_of = pieces_of
        self._poison = poison
        lock = threading.Lock()
        self._lock = lock
        self._may_read = threading.Condition(lock)  # a slot became free, or a restart, or the end
        self._may_use = threading.Condition(lock)  # a layer arrived, or an error, or the end
        self._generation = 0
        self._ticket = 0  # the ticket that is being read
        self._n_taken = 0  # how many of its pieces were handed out
        self._error: tuple[int, BaseException] | None = None  # (ticket, what its read raised)
        self._closed = False
        self._n_busy = 0
        self._busy_since = 0.0
        self._busy_seconds = 0.0
        self._bytes_read = 0

    # --- readers ---------------------------------------------------------------------------

    def acquire_for_read(self, *, wait: bool = True) -> Work | None:
        """The next piece to read, in order; waits for a free slot. None when the ring is closed.

        With `wait` false also None where there is nothing to read at the moment.
        """
        with self._lock:
            while not self._closed:
                work = self._next_work()
                if work is not None or not wait:
                    return work
                self._may_read.wait()
            return None

    def publish(self, work: Work, n_bytes: int = 0, error: BaseException | None = None) -> None:
        """Report that a piece arrived (`n_bytes` read), or that reading it raised `error`."""
        with self._lock:
            slot = work.slot
            slot.n_in_flight -= 1
            self._bytes_read += n_bytes
            self._n_busy -= 1
            if self._n_busy == 0:
                self._busy_seconds += time.perf_counter() - self._busy_since
            if work.generation != self._generation:
                self._may_read.notify_all()
            elif error is None:
                slot.n_missing -= 1
                if slot.n_missing == 0:
                    slot.state = SlotState.READY
                    self._may_use.notify_all()
            elif self._error is None or work.ticket < self._error[0]:
                self._error = (work.ticket, error)
                self._may_use.notify_all()

    # --- consumer --------------------------------------------------------------------------

    def wait_ready(self, ticket: int) -> Slot:
        """Wait until `ticket` has arrived and take its slot.

        Raises:
            whatever reading it raised; the ring then stands still until `restart`.
            StreamerClosed: the ring was closed meanwhile.
        """
        with self._lock:
            slot = self.slots[ticket % len(self.slots)]
            while True:
                if self._closed:
                    raise StreamerClosed("the weight streamer is closed; load the model again")
                if self._error is not None and self._error[0] <= ticket:
                    raise self._error[1]
                if slot.ticket == ticket and slot.state is SlotState.READY:
                    slot.state = SlotState.IN_USE
                    return slot
                if slot.state is SlotState.IN_USE:
                    raise RuntimeError(
                        f"slot {slot.index} is still held by an earlier layer; "
                        f"a ring of {len(self.slots)} slots lends out that many layers at a time"
                    )
                self._may_use.wait(_WAKE_SECONDS)

    def release(self, slot: Slot, ticket: int) -> None:
        """Give the slot of `ticket` back; nothing happens where a restart already took it."""
        with self._lock:
            if not self._closed and slot.ticket == ticket and slot.state is SlotState.IN_USE:
                self._free(slot)
                self._may_read.notify_all()

    def restart(self, ticket: int) -> None:
        """Forget everything that was read or lent, and an error; read on from `ticket`."""
        with self._lock:
            if self._closed:
                return
            self._generation += 1
            self._ticket, self._n_taken = ticket, 0
            self._error = None
            for slot in self.slots:
                self._free(slot)
            self._may_read.notify_all()

    def close(self) -> None:
        """Wake everybody up to leave; `free_buffers` comes after the readers have ended."""
        with self._lock:
            self._closed = True
            self._generation += 1
            self._may_read.notify_all()
            self._may_use.notify_all()

    def free_buffers(self) -> None:
        """Give the memory back. No reader may be running."""
        for slot in self.slots:
            slot.buffer.close()

    def reading_figures(self) -> tuple[int, float]:
        """(bytes read, seconds in which at least one read was running), since the start."""
        with self._lock:
            running = time.perf_counter() - self._busy_since if self._n_busy else 0.0
            return self._bytes_read, self._busy_seconds + running

    # --- with the lock held ----------------------------------------------------------------

    def _next_work(self) -> Work | None:
        if self._error is not None:
            return None
        slot = self.slots[self._ticket % len(self.slots)]
        pieces = self._pieces_of(self._ticket)
        if slot.ticket != self._ticket or slot.state is not SlotState.READING:
            if slot.state is not SlotState.FREE or slot.n_in_flight:
                return None
            slot.state, slot.ticket, slot.n_missing = SlotState.READING, self._ticket, len(pieces)
        work = Work(slot, pieces[self._n_taken], self._ticket, self._generation)
        self._n_taken += 1
        if self._n_taken == len(pieces):
            self._ticket, self._n_taken = self._ticket + 1, 0
        slot.n_in_flight += 1
        if self._n_busy == 0:
            self._busy_since = time.perf_counter()
        self._n_busy += 1
        return work

    def _free(self, slot: Slot) -> None:
        slot.state, slot.ticket = SlotState.FREE, -1
        if self._poison:
            np.frombuffer(slot.buffer.view, dtype=np.uint8)[:] = 0xFF
