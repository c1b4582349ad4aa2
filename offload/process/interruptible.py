"""Ctrl-C where it does no harm: what a signal handler raises waits for a place that can bear it.

Python runs signal handlers in the main thread, between any two bytecodes, and what they raise
(KeyboardInterrupt) comes up right there. In a function that is `uninterrupted` they run as ever,
but what they raise is kept. Long work asks with `check_interrupt` at places where it can be given
up; the end of the function raises it at the latest.

While a C function runs, Python handles no signal in the thread that called it. What computes in C
for long runs in a thread of its own, and the caller waits for it with `wait_for`.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import functools
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from offload.errors import SpecdecError

# `_signal` is what `signal` hands on to after looking for members of enumerations: 70 us a block
# instead of 3 in Python 3.11.

P = ParamSpec("P")
T = TypeVar("T")

POLL_SECONDS = 0.01
"""Between two requests to cancel: one that comes before a pass has begun may be lost."""
_HANDLED = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM")
    if hasattr(signal, name)
]
"""The signals whose handlers are known to raise: Ctrl-C, an end from outside, a time limit."""


@dataclass
class _Block:
    """One call of a function that is not to be interrupted."""

    error: BaseException | None = None
    _handlers: dict[int, Callable[[int, FrameType | None], Any]] = field(default_factory=dict)
    _is_over: bool = False

    def begin(self) -> None:
        for number in _HANDLED:
            handler = _signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                _signal.signal(number, self._handle)

    def end(self) -> None:
        """Put the handlers back, and raise what one of them raised."""
        try:
            for number, handler in self._handlers.items():
                if _signal.getsignal(number) == self._handle:  # else a handler set another one
                    _signal.signal(number, handler)
        finally:
            self._is_over = True
        if self.error is not None:
            raise self._take_error() from None  # what it cut short does not matter beside it

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handlers[number](number, frame)
        except BaseException as error:
            if self._is_over:
                raise
            if self.error is None:
                self.error = error

    def _take_error(self) -> BaseException:
        error, self.error = self.error, None  # no cycle through the traceback
        assert error is not None
        return error


_block: _Block | None = None


def uninterrupted(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function that signals cannot cut: what their handlers raise is raised at its end.

    Called by such a function, or in another thread than the main one, it is as it was.
    """

    @functools.wraps(function)
    def whole(*args: P.args, **kwargs: P.kwargs) -> T:
        global _block
        if _block is not None or threading.current_thread() is not threading.main_thread():
            return function(*args, **kwargs)
        block = _Block()
        try:
            _block = block
            block.begin()
            return function(*args, **kwargs)
        finally:
            _block = None
            block.end()

    return whole


def is_in_signal_handler() -> bool:
    """Whether the calling thread is inside of a signal's handler."""
    handlers = map(_signal.getsignal, signal.valid_signals())
    codes = {getattr(handler, "__code__", None) for handler in handlers} - {None}
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None


def is_interrupted() -> bool:
    """Whether what this thread does is to end soon, since a signal handler raised."""
    return (
        _block is not None
        and _block.error is not None
        and threading.current_thread() is threading.main_thread()
    )


def check_interrupt() -> None:
    """Raise what a signal handler raised, where what the caller does can be given up."""
    if _block is not None and _block.error is not None and is_interrupted():
        raise _block.error


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


def wait_for(work: Future[T], poll: Callable[[], None]) -> T:
    """The result of `work`; meanwhile `poll` is called every now and then."""
    while not work.done():
        poll()
        wait([work], POLL_SECONDS)
    try:
        return work.result()
    finally:
        del work  # no cycle through the traceback of an error


def when_interrupted(stop: Callable[[], None]) -> Callable[[], None]:
    """A `poll` for `wait_for` that lets the work end soon: `stop` may be called again and again."""

    def poll() -> None:
        if is_interrupted():
            stop()

    return poll
