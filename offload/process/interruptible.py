"""Threads beside the main one, and long calls, that Ctrl-C can end.

While a C function runs, Python handles no signal in the thread that called it, and an exception
raised inside a ctypes callback is lost. So a long call, or one that calls back, runs on a thread of
its own, where no signal handler ever runs, and the caller waits where Ctrl-C can reach it.

Ctrl-C may come at any point of what the caller's thread does here. Locks made of Python code
(Event, Condition, the executors' queues) can stay locked for ever then; only `SimpleQueue` and
plain attributes are used, whose operations are one step.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from itertools import count
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.01
"""Between two requests to cancel: one that comes before a pass has begun may be lost."""
_MOST_NICE = 19


class JobQueue:
    """Jobs for one thread, which does them in order."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | int | None] = SimpleQueue()
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        self._numbers = count()
        self._n_reached = -1

    def put(self, job: Callable[[], None]) -> None:
        """A job that raises nothing."""
        self._jobs.put(job)

    def wait_until_empty(self, poll: Callable[[], None] | None = None) -> None:
        """Return when all jobs that were put before are done; meanwhile `poll` every now and then.

        What an interrupt leaves behind does no harm: every call waits for a number of its own.
        """
        number = next(self._numbers)
        self._jobs.put(number)
        while self._n_reached < number:
            if poll is not None:
                poll()
            try:
                self._wakeups.get(timeout=POLL_SECONDS)
            except Empty:
                continue

    def end(self) -> None:
        """Let the thread end after the jobs that are waiting."""
        self._jobs.put(None)

    def serve(self) -> None:
        """In the thread: do the jobs."""
        while (job := self._jobs.get()) is not None:
            if isinstance(job, int):
                self._n_reached = job
                self._wakeups.put(None)
            else:
                job()
            del job  # what it holds is not kept until the next one


class Worker:
    """A thread beside the caller, for one job at a time.

    niceness: how far other threads go first, from 0 to 19. It holds for the threads that a job's
        libraries start as well; on Linux only, elsewhere priorities are the whole process's.
    """

    def __init__(self, name: str, niceness: int = 0) -> None:
        self._jobs = JobQueue()
        self._is_busy = False
        self._stop: Callable[[], None] = _nothing
        self._thread = threading.Thread(target=self._jobs.serve, name=name, daemon=True)
        weakref.finalize(self, self._jobs.end)  # also where starting is interrupted
        if niceness and sys.platform == "linux":
            self._jobs.put(lambda: _be_nice(niceness))
        self._thread.start()

    def begin(self, job: Callable[[], None], stop: Callable[[], None]) -> None:
        """Start `job`, which raises nothing; the one before it has ended: see `settle`.

        `stop` should let it return soon. It may be called before the job has begun, and again.
        """
        self._stop = stop
        self._is_busy = True
        self._jobs.put(job)

    def wait(self, poll: Callable[[], None] | None = None) -> None:
        """Return when the job has ended; meanwhile `poll` every now and then."""
        self._jobs.wait_until_empty(poll)
        self._is_busy = False

    def settle(self) -> None:
        """Stop the job that an interrupt left running, and wait for its end.

        Ctrl-C meanwhile is raised once the thread is idle.
        """
        interrupt: KeyboardInterrupt | None = None
        while self._is_busy:
            try:
                self.wait(self._stop)
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def close(self) -> None:
        """Stop a running job, wait for it, and end the thread. Idempotent."""
        self.settle()
        self._jobs.end()
        self._thread.join()


class CallThread(Worker):
    """A thread for one call at a time."""

    def run(self, call: Callable[[], T], stop: Callable[[], None]) -> T:
        """The result of `call`.

        Raises what `call` raises, or what a signal handler raises here (KeyboardInterrupt); then
        `stop` was called, which should let `call` return soon, and `call` has returned. Only an
        interrupt that follows another at once can leave it running: see `settle`.
        """
        self.settle()
        work = _Call(call)
        try:
            self.begin(work.run, stop)
            self.wait()
        except BaseException:
            self.settle()
            raise
        return work.result()


def call_aside(name: str, call: Callable[[], T], stop: Callable[[], None] | None = None) -> T:
    """`call` in a thread of its own, as `CallThread.run` does; without `stop` it is short."""
    thread = CallThread(name)
    try:
        return thread.run(call, stop or _nothing)
    finally:
        thread.close()


class _Call(Generic[T]):
    """A function, and what came of it."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._results: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """In the thread."""
        try:
            self._results.append(self._function())
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        error, self._error = self._error, None  # no cycle through the traceback
        if error is not None:
            raise error
        return self._results[0]


def _be_nice(niceness: int) -> None:
    """Of the calling thread."""
    thread = threading.get_native_id()
    present = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, min(present + niceness, _MOST_NICE))


def _nothing() -> None:
    pass
