"""ScratchFile: a file without a name that a process writes and reads again, past the page cache.

It is gone with the process, however that ends. Offsets, lengths and buffers are multiples of
ALIGNMENT, as O_DIRECT asks for; where a file system refuses O_DIRECT, pages are written through and
dropped behind each access, so that they do not stay in the memory limit.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from offload.storage.aligned import ALIGNMENT, AlignedBuffer, align_down
from offload.storage.direct_io import StorageError
from offload.storage.page_cache import drop_cached

_O_DIRECT = getattr(os, "O_DIRECT", 0)
_O_TMPFILE = getattr(os, "O_TMPFILE", 0)
_NOT_SUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)
_MAX_IDLE = 16  # transfers in a row without progress before giving up
_MAX_TRANSFER_BYTES = 8 << 20
"""Bytes of one call, as for weights: a cancelled pass waits for one of them."""

Transfer = Callable[[int, memoryview, int], int]
"""(file descriptor, buffer, offset) -> bytes moved."""


def pread_into(descriptor: int, view: memoryview, offset: int) -> int:
    return os.preadv(descriptor, [view], offset)


def pwrite_from(descriptor: int, view: memoryview, offset: int) -> int:
    return os.pwritev(descriptor, [view], offset)


class ScratchFile:
    """An unnamed file in a folder; threads may use it at the same time, at different offsets.

    purpose: the file's contents, for error messages.

    Raises:
        StorageError: the file cannot be made.
    """

    def __init__(self, folder: Path, purpose: str) -> None:
        self._name = f"{purpose} in {folder}"
        self._descriptor = -1
        try:
            self._descriptor, self.direct = _open(folder)
        except OSError as error:
            raise self._fault("cannot be made", error) from error

    def read(self, view: memoryview, offset: int) -> None:
        """Fill `view` with bytes that were written before. Raises StorageError."""
        self._move(view, offset, lambda *where: pread_into(*where), "cannot be read")

    def write(self, view: memoryview, offset: int) -> None:
        """Write all of `view`. Raises StorageError, with what was written left undefined."""
        self._move(view, offset, lambda *where: pwrite_from(*where), "cannot be written")

    def close(self) -> None:
        """Close the file, which frees its space. Idempotent; no transfer may be running."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()

    def _move(self, view: memoryview, offset: int, transfer: Transfer, problem: str) -> None:
        n_done = n_idle = 0
        while n_done < len(view):
            start = align_down(n_done)  # after a short transfer a few bytes are moved again
            part = view[start : start + _MAX_TRANSFER_BYTES]
            try:
                n_moved = transfer(self._descriptor, part, offset + start)
                if not self.direct:
                    os.fdatasync(self._descriptor)  # dirty pages cannot be dropped
                    drop_cached(self._descriptor, offset + start, len(part))
            except OSError as error:
                raise self._fault(problem, error) from error
            n_idle = n_idle + 1 if start + n_moved <= n_done else 0
            if n_idle == _MAX_IDLE or (n_moved == 0 and n_idle):
                raise self._fault(problem, OSError(errno.EIO, "the storage makes no progress"))
            n_done = max(n_done, start + n_moved)

    def _fault(self, problem: str, error: OSError) -> StorageError:
        remedy = "check the storage"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "free space there, or shorten the context"
        return StorageError(f"{self._name} {problem}: {error.strerror or error}: {remedy}")


def _open(folder: Path) -> tuple[int, bool]:
    """Return the descriptor of a new unnamed file, and whether it bypasses the page cache."""
    flags = os.O_RDWR | _O_TMPFILE | getattr(os, "O_CLOEXEC", 0)
    if _O_TMPFILE and _O_DIRECT:
        try:
            descriptor = os.open(folder, flags | _O_DIRECT, 0o600)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
        else:
            if _writes_directly(descriptor):
                return descriptor, True
            os.close(descriptor)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        return os.dup(file.fileno()), False


def _writes_directly(descriptor: int) -> bool:
    """Return whether aligned writes and reads are accepted."""
    probe = AlignedBuffer(ALIGNMENT)
    try:
        os.pwritev(descriptor, [probe.view[:ALIGNMENT]], 0)
        os.preadv(descriptor, [probe.view[:ALIGNMENT]], 0)
        os.ftruncate(descriptor, 0)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            os.close(descriptor)
            raise
        return False
    finally:
        probe.close()
    return True
