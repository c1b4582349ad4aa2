"""CancellablePasses: passes that another thread can cancel."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from backends.contract.backend import BackendError
from backends.llama.context import LlamaContext

_SWITCH_SECONDS = 0.0005


class PassCancelled(BackendError):
    """The pass was cancelled by another thread."""

    def __init__(self) -> None:
        super().__init__("the pass was cancelled")


class CancellablePasses:
    """Runs the passes of one context, one at a time; any thread may cancel the running one."""

    def __init__(self, context: LlamaContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._is_running = False

    def run(self, decode: Callable[[], int]) -> None:
        """Run `decode`, which returns 0, or 2 if it was stopped.

        Raises:
            PassCancelled: `cancel` was called meanwhile.
            Any exception of `decode`.
        """
        with self._lock:
            self._context.request_stop(False)  # a cancel of the previous pass is over
            self._is_running = True
        try:
            code = decode()
        finally:
            with self._lock:
                self._is_running = False
        if code != 0:
            raise PassCancelled

    def cancel(self) -> None:
        """End the running pass, if there is one."""
        with self._lock:
            if self._is_running:
                self._context.request_stop()


class _QuickHandover:
    """Shortens Python's thread switch interval, so that ggml's callbacks get the GIL soon although
    another thread (a drafter) is busy.

    Each of a thousand callbacks may wait for one interval: at the default of 5 ms a pass of 0.45 s
    took 1.1 s beside a busy thread, at 0.5 ms as long as alone. Passes of several models may run at
    once; the last one to end restores the interval.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_inside = 0
        self._before = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if self._n_inside == 0:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, _SWITCH_SECONDS))
            self._n_inside += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._n_inside -= 1
            if self._n_inside == 0:
                sys.setswitchinterval(self._before)


QUICK_HANDOVER = _QuickHandover()
