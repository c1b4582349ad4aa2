"""The threads that read files into the slots of a ring."""

from __future__ import annotations

import threading
import time

from offload.ring.slots import SlotRing
from offload.storage.aligned import HostMemory
from offload.storage.layout import Piece
from offload.storage.reading import OpenFiles
from offload.trace import READ, record_since


class ReaderThreads:
    """`n_readers` daemon threads that fill a ring until it is closed.

    They hold the ring and the files but not the streamer, so that a streamer nobody refers to any
    more can be collected.
    """

    def __init__(self, ring: SlotRing[HostMemory, Piece], files: OpenFiles, n_readers: int) -> None:
        self._threads = [
            threading.Thread(
                target=_read_until_closed,
                args=(ring, files),
                name=f"specdec-reader-{index}",
                daemon=True,
            )
            for index in range(n_readers)
        ]
        for thread in self._threads:
            thread.start()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for all threads together up to the timeout; True when all have ended."""
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _read_until_closed(ring: SlotRing[HostMemory, Piece], files: OpenFiles) -> None:
    while (work := ring.acquire_for_read()) is not None:
        started = time.perf_counter()
        try:
            if work.slot.fence is not None:
                work.slot.fence.wait()  # a device still copies what was in the slot
            n_bytes = files.read(work.piece, work.slot.buffer.view)
        except BaseException as error:  # whatever it is, the consumer must learn of it
            ring.publish(work, error=error)
        else:
            record_since(started, READ, "read", n_bytes, work.piece.path)
            ring.publish(work, n_bytes)
