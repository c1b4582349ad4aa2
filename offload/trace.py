"""Events of a run by thread and time, for a picture of what overlapped.

Off unless `recording` is entered; a hook then costs one test. On, it appends one tuple to a list,
which is safe between threads without a lock and takes about a microsecond.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

from typing_extensions import ParamSpec

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Blocks: TypeAlias = Callable[_P, AbstractContextManager[_T]]

READ = "read"
"""One read from storage, in a reader's thread."""
WAIT = "wait"
"""A pass stalled until a layer was in memory."""
LAYER = "layer"
"""A layer's weights were in use."""
ROUTED = "routed"
"""A pass asked a mixture's layer for experts: the name is the layer's number and theirs."""

MAX_EVENTS = 1_000_000  # about 200 MB; a pass of a large model makes a few hundred


class Event(NamedTuple):
    kind: str
    name: str
    started: float  # seconds of time.perf_counter
    ended: float
    thread: int  # threading.get_ident()
    n_bytes: int = 0  # of a read
    path: Path | None = None  # of a read


class Trace:
    """The events of a recording, in the order of their ends."""

    def __init__(self, max_events: int) -> None:
        self.events: list[Event] = []
        self.n_dropped = 0
        """Events beyond the maximum, which were not recorded."""
        self._max_events = max_events

    def add(self, event: Event) -> None:
        if len(self.events) < self._max_events:
            self.events.append(event)
        else:
            self.n_dropped += 1


_trace: Trace | None = None


def record_since(
    started: float, kind: str, name: str, n_bytes: int = 0, path: Path | None = None
) -> float:
    """Record an event from `started` until now, in this thread; does nothing without a recording.

    Returns the seconds it took.
    """
    ended = time.perf_counter()
    trace = _trace
    if trace is not None:
        trace.add(Event(kind, name, started, ended, threading.get_ident(), n_bytes, path))
    return ended - started


def recorded(kind: str, name: str) -> Callable[[_Blocks[_P, _T]], _Blocks[_P, _T]]:
    """Decorate a function that returns a context manager: each of its blocks is an event."""

    def decorate(block: _Blocks[_P, _T]) -> _Blocks[_P, _T]:
        @wraps(block)
        @contextmanager
        def recorded_block(*args: _P.args, **kwargs: _P.kwargs) -> Iterator[_T]:
            started = time.perf_counter()
            try:
                with block(*args, **kwargs) as value:
                    yield value
            finally:
                record_since(started, kind, name)

        return recorded_block

    return decorate


@contextmanager
def recording(max_events: int = MAX_EVENTS) -> Iterator[Trace]:
    """Record the events of all threads within the block; one recording at a time."""
    global _trace
    if _trace is not None:
        raise RuntimeError("somebody records already")
    _trace = trace = Trace(max_events)
    try:
        yield trace
    finally:
        _trace = None
