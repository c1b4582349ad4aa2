"""A thread that makes one call after the other.

Python runs signal handlers in the main thread, and what they raise (KeyboardInterrupt) surfaces
between any two bytecodes there. Code that must not be interrupted runs in another thread; the
thread that waits for it may be interrupted.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from offload.errors import SpecdecError

T = TypeVar("T")

POLL_SECONDS = 0.01
"""Interval of cancel requests: one that comes before a pass has begun may be lost."""

_starting = threading.Lock()
"""Held while a thread starts: Python sets the stack size for all threads that start afterwards."""


class WorkerClosed(SpecdecError):
    """A call was submitted to a thread that was told to end: its owner is closed."""


class Worker:
    """A thread that makes one call after the other.

    It is a daemon, so that a process can end in the midst of a call.

    Args:
        begin: called in the thread before everything else.
        stack_bytes: stack size of the thread; 0 for the default.
    """

    def __init__(
        self, name: str, begin: Callable[[], None] | None = None, *, stack_bytes: int = 0
    ) -> None:
        calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._calls = calls
        self._is_closed = False
        self._thread = threading.Thread(target=_serve, args=(calls,), name=name, daemon=True)
        weakref.finalize(self, calls.put, None)
        if begin is not None:
            calls.put(begin)
        with _starting:
            before = threading.stack_size()
            threading.stack_size(stack_bytes or before)
            try:
                self._thread.start()
            finally:
                threading.stack_size(before)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Make `call` in the thread, after earlier ones. Raises WorkerClosed after `close`."""
        future: Future[T] = Future()
        self._calls.put(lambda: _make(call, future))
        # Checked last: `close` may be called meanwhile, by another thread or a signal handler. A
        # call that has begun by then is finished; one that is cancelled never begins.
        if self._is_closed and future.cancel():
            raise WorkerClosed(f"{self._thread.name} has ended; load the model again")
        return future

    def close(self) -> None:
        """End the thread after the calls that were submitted. Idempotent."""
        self._is_closed = True
        self._calls.put(None)
        self._thread.join()


def _serve(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # so that its objects do not live until the next one


def _make(call: Callable[[], T], future: Future[T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
        del future, call  # no cycle through the traceback
    else:
        future.set_result(result)


def call_in_thread(call: Callable[[], T], name: str, *, stack_bytes: int = 0) -> T:
    """Make `call` in a thread of its own, and return its result after the thread has ended."""
    worker = Worker(name, stack_bytes=stack_bytes)
    try:
        return worker.submit(call).result()
    finally:
        worker.close()
