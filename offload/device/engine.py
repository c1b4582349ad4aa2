"""The contract of a copy engine: copies bytes from host memory to a device, and orders them.

A device works through two queues of its own, its *streams*: copies in one, computations in the
other, each in order, both beside the host. The host enqueues and goes on. The order across the two
streams is set with events:

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
    """A mark in a stream. Any thread may query it."""

    def is_done(self) -> bool: ...

    def wait(self) -> None:
        """Block the calling thread until the event is done; other threads go on.

        Raises the error of any work before the event. A device that has failed once goes on
        failing, in every later wait and synchronisation, so that no wrong result is ever used.
        """

    def seconds_after(self, earlier: Any) -> float:
        """Return the time on the device's clock from `earlier` to this event; both are done."""


class DeviceBuffer(Protocol):
    """Memory of the device."""

    n_bytes: int

    def part(self, offset: int, n_bytes: int) -> Any:
        """Return these bytes as the device's library knows them (a tensor of uint8); no copy."""

    def close(self) -> None:
        """Free the memory. Nothing enqueued may still use it. Idempotent."""


class CopyEngine(Protocol):
    """One device, one stream of copies and one of computations. Any thread may enqueue.

    Buffers and events that are passed in (Any here) belong to the same engine.
    """

    def allocate_pinned(self, n_bytes: int) -> HostMemory:
        """Return host memory that the device copies from by itself; aligned for O_DIRECT.

        It takes `buffer_bytes(n_bytes)`. Raises MemoryError if it cannot be had.
        """

    def allocate_device(self, n_bytes: int) -> DeviceBuffer:
        """Return memory of the device, at an address that is a multiple of 512.

        Raises BudgetExceeded if it cannot be had.
        """

    def copy(self, source: memoryview, target: Any, offset: int) -> None:
        """Enqueue a copy of `source`, part of pinned memory, to `target` from `offset` on.

        `source` must stay unchanged until the copy is done. Raises if it cannot be enqueued.
        """

    def record_copy(self) -> Event:
        """Return an event after all copies enqueued so far."""

    def record_compute(self) -> Event:
        """Return an event after all computations enqueued so far, by any thread."""

    def copy_waits(self, event: Any) -> None:
        """Let copies enqueued from now on begin after `event`."""

    def compute_waits(self, event: Any) -> None:
        """Let computations enqueued from now on begin after `event`."""

    def synchronize(self) -> None:
        """Block the calling thread until everything enqueued in both streams is done."""
