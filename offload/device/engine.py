"""The contract of a copy engine: brings bytes from host memory to a device, and knows when.

A device works through two queues of its own, its *streams*: copies in one, computations in the
other, each in order, both beside the host. The host enqueues and goes on. What must come before
what across the two is said with events:

    an event is recorded      it is done when all that was enqueued in its stream before it is
    a stream waits for it     nothing that is enqueued in the stream afterwards begins before
    the host waits for it     `event.wait()`

Nothing here knows tensors or CUDA: `backends.cuda.engine` is the engine of a GPU, tests have one
that delays whatever the events allow it to delay.
"""

from __future__ import annotations

from typing import Any, Protocol

from offload.storage.aligned import HostMemory


class Event(Protocol):
    """A mark in a stream. Any thread may ask it."""

    def is_done(self) -> bool: ...

    def wait(self) -> None:
        """Let the calling thread wait, other threads go on.

        Raises whatever became of the work before the event. A device that has failed once goes on
        failing, in every later wait and synchronisation: nothing wrong is ever taken for a result.
        """

    def seconds_after(self, earlier: Any) -> float:
        """Time on the device's clock from `earlier` to this one; both are done."""


class DeviceBuffer(Protocol):
    """Memory of the device."""

    n_bytes: int

    def part(self, offset: int, n_bytes: int) -> Any:
        """These bytes, as the device's library knows them (a tensor of uint8); no copy."""

    def close(self) -> None:
        """Give the memory back. Nothing enqueued may still use it. Idempotent."""


class CopyEngine(Protocol):
    """One device, one stream of copies and one of computations. Any thread may enqueue.

    Buffers and events that are passed in (Any here) are those of the same engine.
    """

    def allocate_pinned(self, n_bytes: int) -> HostMemory:
        """Host memory that the device copies from by itself; aligned for O_DIRECT.

        It takes `buffer_bytes(n_bytes)`. Raises MemoryError where it cannot be had.
        """

    def allocate_device(self, n_bytes: int) -> DeviceBuffer:
        """Memory of the device, at an address that is a multiple of 512.

        Raises BudgetExceeded where it cannot be had.
        """

    def copy(self, source: memoryview, target: Any, offset: int) -> None:
        """Enqueue a copy of `source`, part of pinned memory, to `target` from `offset` on.

        `source` must stay as it is until the copy is done. Raises where it cannot be enqueued.
        """

    def record_copy(self) -> Event:
        """An event after all copies enqueued so far."""

    def record_compute(self) -> Event:
        """An event after all computations enqueued so far, of any thread."""

    def copy_waits(self, event: Any) -> None:
        """Copies enqueued from now on begin after `event`."""

    def compute_waits(self, event: Any) -> None:
        """Computations enqueued from now on begin after `event`."""

    def synchronize(self) -> None:
        """Let the calling thread wait for everything that was enqueued in both streams."""
