"""Threads that read files."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from offload.errors import SpecdecError
from offload.ring.slots import SlotRing
from offload.storage.aligned import HostMemory
from offload.storage.layout import ReadChunk
from offload.storage.reading import OpenFiles
from offload.trace import READ, record_since


class ReaderThreads:
    """`n_readers` daemon threads that read until there is nothing left to read.

    They refer to what they read for but not to its owner, so that a streamer that is no longer
    referred to can be collected.
    """

    def __init__(self, name: str, n_readers: int) -> None:
        self._name, self._n_readers = name, n_readers
        self._threads: list[threading.Thread] = []

    def start(self, read: Callable[[], None]) -> None:
        """Start the threads. Raises SpecdecError if the system refuses one; some may run then."""
        for index in range(self._n_readers):
            thread = threading.Thread(target=read, name=f"{self._name}-{index}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise SpecdecError(
                    f"cannot start thread {index + 1} of {self._n_readers} that read from storage "
                    f"({error}): ask for fewer (--io-threads), or raise the limit of processes"
                ) from error
            self._threads.append(thread)

    @property
    def are_running(self) -> bool:
        """Whether some thread has not ended."""
        return any(thread.is_alive() for thread in self._threads)

    def join(self, timeout_seconds: float) -> bool:
        """Wait for all threads together up to the timeout; True when all have ended."""
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not self.are_running


def fill_ring(ring: SlotRing[HostMemory, ReadChunk], files: OpenFiles) -> None:
    """Fill the slots of a ring until it is closed; the loop of each thread."""
    while (work := ring.acquire_for_read()) is not None:
        started = time.perf_counter()
        try:
            if work.slot.fence is not None:
                work.slot.fence.wait()  # a device still copies what was in the slot
            n_bytes = files.read(work.read_chunk, work.slot.buffer.view)
        except BaseException as error:  # whatever it is, the consumer must learn of it
            ring.publish(work, error=error)
        else:
            record_since(started, READ, "read", n_bytes, work.read_chunk.path)
            ring.publish(work, n_bytes)
