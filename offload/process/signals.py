"""Handlers of signals for the time of a block."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], None]


@contextmanager
def handling(signals: Iterable[signal.Signals], handler: Handler) -> Iterator[None]:
    """Within the block `handler` is called for these signals; afterwards what was called before.

    A signal that is ignored stays ignored: whoever started us under `nohup` meant it so.
    Only the main thread can set handlers. In another one this does nothing: signals go to those of
    the main thread.
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
