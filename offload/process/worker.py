"""A thread that makes one call after the other.

Python runs signal handlers in the main thread, and what they raise (KeyboardInterrupt) comes up
between any two bytecodes there. What must not be cut in two runs in another thread; whoever waits
for it may be interrupted.
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
"""Between two requests to cancel: one that comes before a pass has begun may be lost."""

_starting = threading.Lock()
"""How large a thread's stack is, Python is told for all threads that start from then on."""


class WorkerClosed(SpecdecError):
    """A call was submitted to a thread that was told to end: what it belongs to is closed."""


class Worker:
    """A thread for one call after the other.

    It is a daemon, so that a process can end in the midst of a call.

    Args:
        begin: called in the thread before everything else.
        stack_bytes: of the thread; 0: as many as others have.
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
        """Let the thread make `call` after those before. Raises WorkerClosed after `close`."""
        future: Future[T] = Future()
        self._calls.put(lambda: _make(call, future))
        # Asked last: `close` may be called meanwhile, by another thread or a signal handler. A call
        # that has begun by then is finished; one that is cancelled never begins.
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
        del call  # what it holds is not kept until the next one


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
    """Return what `call` returns in a thread of its own, which has ended then."""
    worker = Worker(name, stack_bytes=stack_bytes)
    try:
        return worker.submit(call).result()
    finally:
        worker.close()
