"""Signal handlers for the time of a block."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], None]


@contextmanager
def handling(signals: Iterable[signal.Signals], handler: Handler) -> Iterator[None]:
    """Call `handler` for these signals within the block, and restore previous handlers afterwards.

    An ignored signal stays ignored: whoever started us under `nohup` wants that. Only the main
    thread can set handlers; in another one this does nothing, since signals go to the main thread.
    """
    try:
        previous = {
            number: signal.signal(number, handler)
            for number in signals
            if signal.getsignal(number) is not signal.SIG_IGN
        }
    except ValueError:
        previous = {}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


@contextmanager
def delayed_interrupt() -> Iterator[list[int]]:
    """Let Ctrl-C take effect at the end of the block; yield a list that is empty until it comes.

    For calls of C libraries that call back: Python would handle the signal in the callback, and
    ctypes loses what is raised there. In other threads than the main one this does nothing.
    """
    received: list[int] = []
    try:
        with handling((signal.SIGINT,), lambda number, frame: received.append(number)):
            yield received
    finally:
        if received:
            signal.raise_signal(signal.SIGINT)
