"""C calls that Ctrl-C can end.

While a C function runs, Python handles no signal in the thread that called it, and an exception
raised inside a ctypes callback is lost. So a long call runs on a thread of its own, where no signal
handler ever runs, and the caller waits where Ctrl-C can reach it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class CallThread:
    """A thread for one call at a time."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    def run(self, call: Callable[[], T], stop: Callable[[], None]) -> T:
        """The result of `call`.

        Raises what `call` raises, or what a signal handler raises here (KeyboardInterrupt); then
        `stop` was called, which should let `call` return soon, and `call` has returned.
        """
        try:
            return self._executor.submit(call).result()
        except BaseException:
            stop()
            self._wait()
            raise

    def close(self) -> None:
        """Wait for a running call."""
        self._executor.shutdown()

    def _wait(self) -> None:
        """Wait until the thread is idle, however often Ctrl-C is pressed."""
        while True:
            try:
                self._executor.submit(int).result()
            except KeyboardInterrupt:
                continue
            return
