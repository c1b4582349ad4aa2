"""Waking another thread up, in calls that Ctrl-C may cut anywhere."""

from __future__ import annotations

import threading
from contextlib import suppress


class Bell:
    """Wakes one waiting thread up; rung while nobody waits, it is kept for the next one.

    It holds no lock of Python code, so that an interrupt may come at any moment of a call.
    """

    def __init__(self) -> None:
        self._silent = threading.Lock()
        self._silent.acquire()

    def ring(self) -> None:
        with suppress(RuntimeError):  # it has been rung already
            self._silent.release()

    def wait(self, timeout_seconds: float = -1) -> None:
        """Return when it was rung, or after the timeout (-1: never)."""
        self._silent.acquire(timeout=timeout_seconds)
