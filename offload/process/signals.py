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
