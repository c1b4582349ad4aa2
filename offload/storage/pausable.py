"""Reads that can be paused for a moment, so that they do not disturb what is measured meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offload.storage.direct_io import DirectFile, OpenStorage, Storage


class PausableReads:
    """Opener of files whose reads wait while `paused`."""

    def __init__(self, open_storage: OpenStorage = DirectFile) -> None:
        self._open_storage = open_storage
        self._changed = threading.Condition()
        self._is_paused = False
        self._n_running = 0
        self._n_bytes = 0

    def open(self, path: Path) -> Storage:
        return _PausableFile(self, self._open_storage(path))

    @contextmanager
    def paused(self) -> Iterator[int]:
        """Wait for running reads, and let none begin; yields the bytes read so far."""
        with self._changed:
            self._is_paused = True
            self._changed.wait_for(lambda: not self._n_running)
            n_bytes = self._n_bytes
        try:
            yield n_bytes
        finally:
            with self._changed:
                self._is_paused = False
                self._changed.notify_all()

    @contextmanager
    def reading(self, n_bytes: int) -> Iterator[None]:
        """Count a read of `n_bytes` as running inside the block; waits while paused."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_paused)
            self._n_running += 1
        try:
            yield
        finally:
            with self._changed:
                self._n_running -= 1
                self._n_bytes += n_bytes
                self._changed.notify_all()


class _PausableFile:
    def __init__(self, reads: PausableReads, file: Storage) -> None:
        self._reads, self._file = reads, file
        self.check_unchanged, self.close = file.check_unchanged, file.close

    def read_into(self, view: memoryview, offset: int) -> int:
        with self._reads.reading(len(view)):
            return self._file.read_into(view, offset)
