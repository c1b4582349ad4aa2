"""The ring: a few buffers that all streamed layers pass through, each in turn.

A *read sequence number* counts the layer reads since the start (0, 1, 2, ...), over all passes:
read r goes into slot r % n_slots, whatever the number of layers, so that the ring depth need not
divide it. A slot goes FREE -> READING -> READY -> IN_USE -> FREE:

    readers    acquire_for_read() -> Work; publish(work)          (READY after its last chunk)
    consumer   wait_ready(read_number) -> Slot; release(slot, read_number)

If something still uses a slot after its release (a copy to a device, a computation on one), the
slot is freed behind a *fence*: the event after which it may be overwritten. Whoever fills it next
waits for the fence. The ring makes the fence whenever it frees a slot in use, so that no path can
forget it.

`restart(read_number)` drops all that was read ahead. Reads that are still running then belong to an
old *generation*: their result is ignored, and their slot is not filled again before they have
ended. One lock guards everything, including the read order; it is held for microseconds and never
during a read.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from offload.errors import SpecdecError
from offload.storage.aligned import HostMemory

WAKE_SECONDS = 0.1  # interval at which a wait calls its check
JOIN_SECONDS = 10.0  # a read that hangs longer (a dead network mount) is left behind

Check = Callable[[], None]
"""Raises to interrupt a wait; called every tenth of a second at least."""


class StreamerClosed(SpecdecError):
    """The streamer was closed before or while a layer was entered."""


class SlotState(enum.Enum):
    FREE = enum.auto()
    READING = enum.auto()
    READY = enum.auto()
    IN_USE = enum.auto()


class AnyMemory(Protocol):
    """Memory of a slot."""

    def close(self) -> None: ...


class Fence(Protocol):
    """An event in the future or the past."""

    def wait(self) -> None: ...


MemoryT = TypeVar("MemoryT", bound=AnyMemory)
ReadChunkT = TypeVar("ReadChunkT")
"""Type of one transfer into a slot: a read of a file, or a copy."""


@dataclass
class Slot(Generic[MemoryT]):
    """One buffer of the ring and what is in it."""

    index: int
    buffer: MemoryT
    state: SlotState = SlotState.FREE
    read_number: int = -1  # the layer read that the content belongs to
    n_missing: int = 0  # chunks of this read that have not arrived yet
    n_in_flight: int = 0  # reads into the buffer that are running, of any generation
    fence: Fence | None = None  # nothing may be written to the buffer before it


@dataclass(frozen=True)
class Work(Generic[MemoryT, ReadChunkT]):
    """One chunk to read into one slot, after the slot's fence."""

    slot: Slot[MemoryT]
    read_chunk: ReadChunkT
    read_number: int
    generation: int


class SlotRing(Generic[MemoryT, ReadChunkT]):
    """One slot for each of `buffers`, which `free_buffers` closes.

    Args:
        pieces_of: returns the chunks of a read sequence number, at least one.
        make_fence: returns the event after which a slot released now may be overwritten; None if
            the consumer is done with it by then.
        poison: overwrites a slot when it is released, so that a test sees a stale view at once; not
            together with fences, until which it may not be overwritten.
    """

    def __init__(
        self,
        buffers: Iterable[MemoryT],
        read_chunks: Callable[[int], Sequence[ReadChunkT]],
        *,
        make_fence: Callable[[], Fence] | None = None,
        poison: Callable[[MemoryT], None] | None = None,
    ) -> None:
        self.slots = tuple(Slot(index, buffer) for index, buffer in enumerate(buffers))
        self._pieces_of = read_chunks
        self._make_fence = make_fence
        self._poison = poison
        # Reentrant: an abandoned layer may be collected, and released, while the lock is held.
        self.lock = threading.RLock()
        self._may_read = threading.Condition(self.lock)  # a slot is free, or a restart, or the end
        self._may_use = threading.Condition(self.lock)  # a layer is in, or an error, or the end
        self._generation = 0
        self._read_number = 0  # the layer read that is being handed out
        self._n_taken = 0  # how many of its chunks were handed out
        self._error: tuple[int, BaseException] | None = None  # (read number, its error)
        self._closed = False
        self._n_busy = 0
        self._busy_since = 0.0
        self._busy_seconds = 0.0
        self._bytes_read = 0

    # --- readers ---------------------------------------------------------------------------

    def acquire_for_read(self, *, wait: bool = True) -> Work[MemoryT, ReadChunkT] | None:
        """Return the next chunk to read, in order; wait for a free slot. None if closed.

        With `wait` false also None if there is nothing to read at the moment.
        """
        with self.lock:
            while wait and not self._closed and not self._has_work():
                self._may_read.wait()
            return self._next_work() if self._has_work() else None

    def publish(
        self, work: Work[MemoryT, ReadChunkT], n_bytes: int = 0, error: BaseException | None = None
    ) -> None:
        """Report that a chunk arrived (`n_bytes` read), or that reading it raised `error`."""
        with self.lock:
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
            elif self._error is None or work.read_number < self._error[0]:
                self._error = (work.read_number, error)
                self._may_use.notify_all()

    # --- consumer --------------------------------------------------------------------------

    def wait_ready(self, read_number: int, check: Check | None = None) -> Slot[MemoryT]:
        """Wait until read `read_number` has arrived and take its slot.

        check: called regularly while waiting; what it raises ends the wait.

        Raises:
            The error of a failed read; the ring then stands still until `restart`.
            StreamerClosed: the ring was closed meanwhile.
        """
        with self.lock:
            while (slot := self._take_ready(read_number)) is None:
                if check is not None:
                    check()
                self._may_use.wait(WAKE_SECONDS)
            return slot

    @property
    def failure(self) -> BaseException | None:
        """The error of a failed read, for which the ring stands still."""
        with self.lock:
            return None if self._error is None else self._error[1]

    def release(self, slot: Slot[MemoryT], read_number: int) -> None:
        """Release the slot of `read_number`; does nothing if a restart already did."""
        with self.lock:
            if (
                not self._closed
                and slot.read_number == read_number
                and slot.state is SlotState.IN_USE
            ):
                self._free(slot)
                self._may_read.notify_all()

    def exchange(self, slot: Slot[MemoryT], read_number: int, buffer: MemoryT) -> MemoryT | None:
        """Return the memory of an acquired slot, with its content, and release the slot with
        `buffer` instead. None, and nothing changes, if a restart already released it."""
        with self.lock:
            if (
                self._closed
                or slot.read_number != read_number
                or slot.state is not SlotState.IN_USE
            ):
                return None
            taken, slot.buffer = slot.buffer, buffer
            self._free(slot)
            self._may_read.notify_all()
            return taken

    @property
    def has_slot_in_use(self) -> bool:
        """Whether a slot is acquired."""
        return any(slot.state is SlotState.IN_USE for slot in self.slots)

    def restart(self, read_number: int) -> None:
        """Release all slots, drop what was read and any error; read on from `read_number`, which
        was not used before."""
        with self.lock:
            if self._closed:
                return
            self._generation += 1
            self._read_number, self._n_taken = read_number, 0
            self._error = None
            for slot in self.slots:
                self._free(slot)
            self._may_read.notify_all()

    def close(self) -> None:
        """Wake all waiting threads to end; `free_buffers` comes after the readers have ended."""
        with self.lock:
            self._closed = True
            self._generation += 1
            self._may_read.notify_all()
            self._may_use.notify_all()

    def free_buffers(self) -> None:
        """Free the memory. No reader may be running."""
        for slot in self.slots:
            slot.buffer.close()

    def read_stats(self) -> tuple[int, float]:
        """Return (bytes read, seconds in which at least one read was running), since the start."""
        with self.lock:
            running = time.perf_counter() - self._busy_since if self._n_busy else 0.0
            return self._bytes_read, self._busy_seconds + running

    # --- with the lock held ----------------------------------------------------------------

    def _take_ready(self, read_number: int) -> Slot[MemoryT] | None:
        if self._closed:
            raise StreamerClosed("the weight streamer is closed; load the model again")
        if self._error is not None and self._error[0] <= read_number:
            raise self._error[1]
        slot = self.slots[read_number % len(self.slots)]
        if slot.read_number == read_number and slot.state is SlotState.READY:
            slot.state = SlotState.IN_USE
            return slot
        if slot.state is SlotState.IN_USE:
            raise RuntimeError(
                f"slot {slot.index} is still in use by an earlier layer; "
                f"a ring of {len(self.slots)} slots has at most that many layers in use"
            )
        return None

    def _has_work(self) -> bool:
        if self._closed or self._error is not None:
            return False
        slot = self.slots[self._read_number % len(self.slots)]
        if slot.state is SlotState.READING:
            return slot.read_number == self._read_number
        return slot.state is SlotState.FREE and slot.n_in_flight == 0

    def _next_work(self) -> Work[MemoryT, ReadChunkT]:
        slot = self.slots[self._read_number % len(self.slots)]
        pieces = self._pieces_of(self._read_number)
        if slot.state is SlotState.FREE:
            slot.state, slot.read_number, slot.n_missing = (
                SlotState.READING,
                self._read_number,
                len(pieces),
            )
        work = Work(slot, pieces[self._n_taken], self._read_number, self._generation)
        self._n_taken += 1
        if self._n_taken == len(pieces):
            self._read_number, self._n_taken = self._read_number + 1, 0
        slot.n_in_flight += 1
        if self._n_busy == 0:
            self._busy_since = time.perf_counter()
        self._n_busy += 1
        return work

    def _free(self, slot: Slot[MemoryT]) -> None:
        if self._make_fence is not None and slot.state is SlotState.IN_USE:
            slot.fence = self._make_fence()  # first: if it fails, the slot stays acquired
        slot.read_number, slot.state = -1, SlotState.FREE
        if self._poison is not None:
            self._poison(slot.buffer)


def poison_memory(buffer: HostMemory) -> None:
    """Overwrite memory with 0xFF, NaN in every float format."""
    np.frombuffer(buffer.view, dtype=np.uint8)[:] = 0xFF
