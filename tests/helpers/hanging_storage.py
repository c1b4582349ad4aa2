"""Storage whose reads begin and hang until they are released."""

from __future__ import annotations

import threading

import pytest

from offload.storage.direct_io import DirectFile


class HangingStorage:
    """Make all reads of streamed files hang while `hang` is active."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._lifted = threading.Event()
        self._lifted.set()
        self._reached = threading.Event()
        read_into = DirectFile.read_into

        def read(file: DirectFile, view: memoryview, offset: int) -> int:
            if not self._lifted.is_set():
                self._reached.set()
                self._lifted.wait()
            return read_into(file, view, offset)

        patch.setattr(DirectFile, "read_into", read)

    def hang(self) -> None:
        self._reached.clear()
        self._lifted.clear()

    def wait_until_reached(self) -> None:
        """Return when a read hangs."""
        self._reached.wait()

    def let_go(self) -> None:
        self._lifted.set()

    @property
    def is_hanging(self) -> bool:
        """Return whether a read has begun and not ended."""
        return self._reached.is_set() and not self._lifted.is_set()
