"""Checked reads that bypass the page cache.

O_DIRECT into huge-page-backed memory is the fastest way to get weights from storage, and it leaves
no copy of them in the page cache, which would count in the memory limit. It asks for aligned
buffers, offsets and lengths. Every read's result is checked: a short read that goes unnoticed
leaves the previous layer's weights in the buffer, and the model silently answers nonsense.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from offload.errors import SpecdecError
from offload.storage.aligned import PAGE_BYTES, AlignedBuffer, align_down, page_down
from offload.storage.page_cache import bytes_from_devices, drop_cached, is_cached

logger = logging.getLogger(__name__)

_O_DIRECT = getattr(os, "O_DIRECT", 0)
_NOT_SUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP)
_MAX_IDLE_READS = 16  # reads in a row without progress before giving up

ReadAt = Callable[[int, memoryview, int], int]
"""(file descriptor, writable buffer, offset) -> bytes read, as `pread`."""


class StorageError(SpecdecError):
    """Bytes could not be read from a file that was readable when it was opened."""


class Storage(Protocol):
    """An open file that the streamer reads from; tests replace it with faulty ones."""

    def read_into(self, view: memoryview, offset: int) -> int: ...

    def check_unchanged(self) -> None: ...

    def close(self) -> None: ...


OpenStorage = Callable[[Path], Storage]


def pread_into(descriptor: int, view: memoryview, offset: int) -> int:
    """Read with one `preadv` (the GIL is released while it runs). Source: preadv(2)."""
    return os.preadv(descriptor, [view], offset)


def _reads_directly(descriptor: int) -> bool:
    """Return whether a read leaves nothing in the page cache. Raises OSError if it is refused.

    Some file systems accept O_DIRECT and ignore it (btrfs for compressed files, tmpfs). If the page
    was cached already, because some process has mapped the file, the read must reach a device.
    """
    # In the middle, because the first page is the header's, which others may read meanwhile.
    offset = page_down(os.fstat(descriptor).st_size // 2)
    drop_cached(descriptor, offset, PAGE_BYTES)
    probe = AlignedBuffer(PAGE_BYTES)
    try:
        was_there, n_before = is_cached(descriptor, offset), bytes_from_devices()
        os.preadv(descriptor, [probe.view], offset)
        if was_there:
            return n_before is None or bytes_from_devices() != n_before
        return not is_cached(descriptor, offset)
    finally:
        probe.close()


class DirectFile:
    """A file opened for O_DIRECT reads, or for buffered reads where that fails; with drop-behind.

    Threads may read at the same time. `read_at` exists for tests, which inject faults there.

    warns: whether to log once that a file system has no O_DIRECT.
    """

    _warned = False  # the fallback is logged once per process
    _lock = threading.Lock()

    def __init__(
        self, path: Path, *, read_at: ReadAt = pread_into, direct: bool = True, warns: bool = True
    ) -> None:
        self.path, self._warns = path, warns
        self._read_at = read_at
        self._descriptor = -1
        self._descriptor, self.direct = self._open(direct)
        status = os.fstat(self._descriptor)
        self.n_bytes = status.st_size
        self._modified_ns = status.st_mtime_ns

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill `view` from `offset`, all aligned; past the file's end it stays as it is.

        Returns:
            The number of valid bytes: `len(view)`, or fewer if the file (as opened) ends.

        Raises:
            StorageError: an I/O error, or the file ended before the requested bytes.
        """
        num_requested = min(len(view), self.n_bytes - offset)
        n_got = 0
        n_idle = 0
        while n_got < num_requested:
            # A short read is continued at an aligned offset, so that a few bytes are read again.
            start = align_down(n_got)
            try:
                n_read = self._read_once(view[start:], offset + start)
            except OSError as error:
                reason = error.strerror or str(error)
                raise self._fault(reason, offset, num_requested, n_got) from error
            n_idle = n_idle + 1 if start + n_read <= n_got else 0
            if n_read == 0 or (n_idle and self._is_shorter_than(offset + num_requested)):
                raise self._fault("the file ended early", offset, num_requested, n_got)
            if n_idle == _MAX_IDLE_READS:
                raise self._fault("the storage makes no progress", offset, num_requested, n_got)
            n_got = max(n_got, start + n_read)
        if num_requested <= 0:
            raise self._fault("the file is too short", offset, len(view), 0)
        return num_requested

    def check_unchanged(self) -> None:
        """Raise StorageError if the file was overwritten since it was opened.

        Replacing the file by a rename is no error: the descriptor still refers to the old one.
        Size and modification time are compared, not the content.
        """
        try:
            status = os.fstat(self._descriptor)
        except OSError as error:
            raise StorageError(f"{self.path} is gone: {error.strerror or error}") from error
        if (status.st_size, status.st_mtime_ns) != (self.n_bytes, self._modified_ns):
            raise StorageError(
                f"{self.path} was changed while in use ({self.n_bytes} bytes when opened, "
                f"{status.st_size} now); load the model again"
            )

    def drop_cached(self) -> None:
        """Drop the file's pages from the page cache, except pages that are mapped."""
        drop_cached(self._descriptor)

    def close(self) -> None:
        """Close the file; closing twice is allowed. No read may be running."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()

    def _open(self, direct: bool) -> tuple[int, bool]:
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
        try:
            if direct and _O_DIRECT:
                descriptor = self._try_direct(flags)
                if descriptor is not None:
                    return descriptor, True
            descriptor = os.open(self.path, flags)
        except OSError as error:
            raise StorageError(f"cannot open {self.path}: {error.strerror or error}") from error
        if direct and self._warns:
            self._warn_once()
        return descriptor, False

    def _try_direct(self, flags: int) -> int | None:
        """Return a descriptor that has served an O_DIRECT read, or None if not supported."""
        try:
            descriptor = os.open(self.path, flags | _O_DIRECT)
        except OSError as error:
            if error.errno in _NOT_SUPPORTED:
                return None
            raise
        # Some file systems accept the flag and refuse the reads, or ask for larger blocks.
        try:
            if _reads_directly(descriptor):
                return descriptor
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                os.close(descriptor)
                raise
        os.close(descriptor)
        return None

    def _read_once(self, view: memoryview, offset: int) -> int:
        for _ in range(_MAX_IDLE_READS - 1):
            try:
                n_read = self._read_at(self._descriptor, view, offset)
                break
            except InterruptedError:  # os.preadv retries by itself; other implementations may not
                continue
        else:
            n_read = self._read_at(self._descriptor, view, offset)
        # Drop-behind: pages of weights that were read once would only fill the memory limit. It
        # takes 10 us, and only one page was probed for whether the file system honours O_DIRECT.
        drop_cached(self._descriptor, offset, len(view))
        return n_read

    def _is_shorter_than(self, n_bytes: int) -> bool:
        return os.fstat(self._descriptor).st_size < n_bytes

    def _fault(self, reason: str, offset: int, num_requested: int, n_got: int) -> StorageError:
        return StorageError(
            f"{self.path}: {reason} at offset {offset} (wanted {num_requested} bytes, "
            f"got {n_got}); check the storage and the file's size"
        )

    def _warn_once(self) -> None:
        with DirectFile._lock:
            if DirectFile._warned:
                return
            DirectFile._warned = True
        logger.warning(
            "%s lies on a file system without O_DIRECT: reading through the page cache with "
            "drop-behind, which is slower; put the model on a local disk",
            self.path,
        )
