"""A device on the host that delays, or hurries, whatever its events allow: the adversary of tests.

Copies and computations are closures in two queues. They read and write memory at the moment when
they are *run*, not when they are enqueued, so that a copy from a pinned slot that was given back
too early, or a computation on a device slot that was overwritten too early, sees the wrong bytes.
When they run is the policy's:

    LATE     not before somebody waits for them (or for what comes after them)
    EARLY    as soon as what they wait for is done
    RANDOM   now and then, a few at a time

Nothing here sleeps or measures: time is counted in bytes copied and units of computation.
"""

from __future__ import annotations

import enum
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from offload.budget import BudgetExceeded
from offload.storage.aligned import AlignedBuffer

POISON = 0xFF


class Policy(enum.Enum):
    LATE = enum.auto()
    EARLY = enum.auto()
    RANDOM = enum.auto()


class DeviceBroken(RuntimeError):
    """The device failed and is unusable from then on."""


class FakeEvent:
    """An event that is done once everything before it in its stream has been run."""

    def __init__(self, device: FakeDevice, stream: Stream) -> None:
        self.device, self.stream = device, stream
        self.done = False
        self.time = 0.0

    def is_done(self) -> bool:
        with self.device.lock:
            return self.done

    def wait(self) -> None:
        with self.device.lock:
            self.device.finish(self)
            self.device.go_on()
            self.device.check()

    def seconds_after(self, earlier: FakeEvent) -> float:
        assert self.done
        assert earlier.done
        return self.time - earlier.time


@dataclass
class Step:
    """One entry of a stream: work, an event to wait for, or an event to mark."""

    run: Callable[[], None] | None = None
    seconds: float = 0.0
    waits_for: FakeEvent | None = None
    marks: FakeEvent | None = None


@dataclass
class Stream:
    policy: Policy
    steps: deque[Step] = field(default_factory=deque)
    clock: float = 0.0
    """When its last step was over, had the host enqueued everything at once."""

    @property
    def can_go_on(self) -> bool:
        return bool(self.steps) and (
            self.steps[0].waits_for is None or self.steps[0].waits_for.done
        )


class FakeBuffer:
    """Memory of the fake device; poisoned before its first use and after its last."""

    def __init__(self, device: FakeDevice, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self.memory = bytearray([POISON]) * n_bytes
        self.is_closed = False
        self._device = device
        device.n_allocated += n_bytes

    def part(self, offset: int, n_bytes: int) -> memoryview:
        assert not self.is_closed
        return memoryview(self.memory)[offset : offset + n_bytes]

    def write(self, offset: int, source: memoryview) -> None:
        if self.is_closed:
            raise DeviceBroken("a copy to memory that was given back")
        self.memory[offset : offset + len(source)] = source

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._device.n_allocated -= self.n_bytes
            self.memory[:] = bytes([POISON]) * self.n_bytes


class FakePinned(AlignedBuffer):
    """Host memory that counts as pinned until it is closed."""

    def __init__(self, device: FakeDevice, n_bytes: int) -> None:
        super().__init__(n_bytes)
        self._device = device
        self._is_counted = True
        device.n_pinned += n_bytes

    def close(self) -> None:
        if self._is_counted:
            self._is_counted = False
            self._device.n_pinned -= self.n_bytes
            self.view[:] = bytes([POISON]) * len(self.view)
        super().close()


class FakeDevice:
    """A CopyEngine, and `compute` for those who use it.

    Args:
        fail_copies: numbers of the calls of `copy` that raise, and enqueue nothing.
        break_at: number of the step of work at which the device breaks for good.
    """

    def __init__(
        self,
        copies: Policy = Policy.LATE,
        computations: Policy = Policy.LATE,
        seed: int = 0,
        *,
        fail_copies: frozenset[int] = frozenset(),
        break_at: int | None = None,
        capacity_bytes: int | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.copying, self.compute_stream = Stream(copies), Stream(computations)
        self.n_allocated = self.n_pinned = 0
        self.n_copies = self.n_steps = 0
        self.fail_copies, self.break_at, self.capacity_bytes = fail_copies, break_at, capacity_bytes
        self._rng = random.Random(seed)
        self._failure: BaseException | None = None

    # --- CopyEngine -------------------------------------------------------------------------------

    def allocate_pinned(self, n_bytes: int) -> FakePinned:
        return FakePinned(self, n_bytes)

    def allocate_device(self, n_bytes: int) -> FakeBuffer:
        if self.capacity_bytes is not None and self.n_allocated + n_bytes > self.capacity_bytes:
            left = self.capacity_bytes - self.n_allocated
            raise BudgetExceeded("the fake device", n_bytes, left, self.n_allocated + n_bytes)
        return FakeBuffer(self, n_bytes)

    def copy(self, source: memoryview, target: FakeBuffer, offset: int) -> None:
        assert len(source)
        assert offset + len(source) <= target.n_bytes
        with self.lock:
            self.n_copies += 1
            if self.n_copies - 1 in self.fail_copies:
                raise RuntimeError("this copy cannot be enqueued")
        self._enqueue(self.copying, Step(lambda: target.write(offset, source), float(len(source))))

    def record_copy(self) -> FakeEvent:
        return self._record(self.copying)

    def record_compute(self) -> FakeEvent:
        return self._record(self.compute_stream)

    def copy_waits(self, event: FakeEvent) -> None:
        self._enqueue(self.copying, Step(waits_for=event))

    def compute_waits(self, event: FakeEvent) -> None:
        self._enqueue(self.compute_stream, Step(waits_for=event))

    def synchronize(self) -> None:
        with self.lock:
            for stream in (self.compute_stream, self.copying):
                self.finish(self._record(stream))
            self.check()

    # --- computation ------------------------------------------------------------------------------

    def compute(self, work: Callable[[], None], seconds: float = 1.0) -> None:
        """Enqueue a computation."""
        self._enqueue(self.compute_stream, Step(work, seconds))

    # --- device -----------------------------------------------------------------------------------

    def check(self) -> None:
        if self._failure is not None:
            raise DeviceBroken("the device is broken") from self._failure

    def finish(self, event: FakeEvent) -> None:
        """Run everything necessary before `event`, and nothing else."""
        while not event.done:
            head = event.stream.steps[0]
            if head.waits_for is not None and not head.waits_for.done:
                self.finish(head.waits_for)
            self._step(event.stream)

    def _record(self, stream: Stream) -> FakeEvent:
        event = FakeEvent(self, stream)
        self._enqueue(stream, Step(marks=event))
        return event

    def _enqueue(self, stream: Stream, step: Step) -> None:
        with self.lock:
            self.check()
            stream.steps.append(step)
            self.go_on()

    def go_on(self) -> None:
        """Run whatever may run now, as far as the policies permit."""
        streams = [self.copying, self.compute_stream]
        self._rng.shuffle(streams)
        while sum(self._ran_a_step(stream) for stream in streams):  # all streams, in turn
            pass

    def _ran_a_step(self, stream: Stream) -> bool:
        if not stream.can_go_on or stream.policy is Policy.LATE:
            return False
        if stream.policy is Policy.RANDOM and self._rng.random() < 0.5:
            return False
        self._step(stream)
        return True

    def _step(self, stream: Stream) -> None:
        step = stream.steps.popleft()
        if step.waits_for is not None:
            stream.clock = max(stream.clock, step.waits_for.time)
        if step.run is not None:
            self._run(step.run)
        stream.clock += step.seconds
        if step.marks is not None:
            step.marks.done, step.marks.time = True, stream.clock

    def _run(self, work: Callable[[], None]) -> None:
        self.n_steps += 1
        if self._failure is not None:
            return
        try:
            if self.n_steps - 1 == self.break_at:
                raise DeviceBroken("this step failed")
            work()
        except BaseException as error:
            self._failure = error
