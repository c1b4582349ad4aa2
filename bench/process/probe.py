"""Raw bandwidth of the storage under one file: the roofline of streaming.

A plain loop of threads and `preadv`, into buffers of its own. It shares no code with the streamer,
so that a fault that slows the streamer's reads does not also slow this reference.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from offload.errors import SpecdecError

BLOCK_BYTES = 8 << 20
"""Bytes per read. Larger reads are no faster and take memory from the measured run."""
N_THREADS = 4
BUFFER_BYTES = N_THREADS * BLOCK_BYTES
"""Memory of a probe with the defaults."""
PROBE_BYTES = 1 << 30
DIRECT = "O_DIRECT"
BUFFERED = "buffered reads, page cache dropped by posix_fadvise"

_PAGE_BYTES = mmap.PAGESIZE
_O_DIRECT = getattr(os, "O_DIRECT", 0)


class ProbeError(SpecdecError):
    """The bandwidth of a file cannot be measured."""


@dataclass(frozen=True)
class Bandwidth:
    """Result of one measurement."""

    n_bytes: int
    """Bytes that were read: the whole range, once."""
    seconds: float
    method: str
    """DIRECT, or BUFFERED if the file system refuses O_DIRECT, which caches may make too fast."""

    @property
    def bytes_per_second(self) -> float:
        return self.n_bytes / self.seconds


def probe_bandwidth(
    path: Path,
    *,
    n_bytes: int = PROBE_BYTES,
    block_bytes: int = BLOCK_BYTES,
    n_threads: int = N_THREADS,
) -> Bandwidth:
    """Read `n_bytes` of the file (or all of it if shorter) with `n_threads` at a time.

    The range begins at a random block and wraps around at the end of the file, so that a cache
    below the file system cannot answer one probe with data of the last.

    Raises:
        ProbeError: the file cannot be read, is empty, or ends before its own size.
        ValueError: blocks that are no whole pages, which O_DIRECT cannot read.
    """
    if block_bytes <= 0 or block_bytes % _PAGE_BYTES or n_threads < 1 or n_bytes < 1:
        raise ValueError(f"cannot probe {n_bytes} bytes in blocks of {block_bytes}, {n_threads=}")
    try:
        descriptor, method = _open(path)
        try:
            return _read_range(path, descriptor, method, n_bytes, block_bytes, n_threads)
        finally:
            os.close(descriptor)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ProbeError(f"cannot measure the storage of {path}: {reason}") from error


def _open(path: Path) -> tuple[int, str]:
    """Return (descriptor, method); reads one page, since some file systems refuse only reads."""
    if _O_DIRECT:
        descriptor = -1
        page = mmap.mmap(-1, _PAGE_BYTES)
        try:
            descriptor = os.open(path, os.O_RDONLY | _O_DIRECT)
            os.preadv(descriptor, [page], 0)
            return descriptor, DIRECT
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            if error.errno != errno.EINVAL:
                raise
        finally:
            page.close()
    return os.open(path, os.O_RDONLY), BUFFERED


def _read_range(
    path: Path, descriptor: int, method: str, n_bytes: int, block_bytes: int, n_threads: int
) -> Bandwidth:
    size = os.fstat(descriptor).st_size
    if size == 0:
        raise ProbeError(f"{path} is empty: measure with a weight file")
    if method == BUFFERED:
        _drop_cached(descriptor)
    blocks = _blocks(size, n_bytes, block_bytes)
    readers = [_Reader(descriptor, blocks, size, block_bytes) for _ in range(n_threads)]
    started = time.perf_counter()
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    seconds = max(time.perf_counter() - started, 1e-9)
    for reader in readers:
        if reader.error is not None:
            raise reader.error
    if method == BUFFERED:
        _drop_cached(descriptor)  # the pages would count in the memory limit of the next run
    return Bandwidth(sum(reader.n_read for reader in readers), seconds, method)


def _blocks(size: int, n_bytes: int, block_bytes: int) -> Iterator[int]:
    """Return offsets of the blocks, from a random one on. `next` on it is atomic in CPython."""
    n_blocks = -(-size // block_bytes)
    first = random.randrange(n_blocks)
    offsets = [(first + i) % n_blocks * block_bytes for i in range(n_blocks)]
    return iter(offsets[: -(-n_bytes // block_bytes)])


class _Reader(threading.Thread):
    """Thread that reads the next block until the last; an error ends it and is stored."""

    def __init__(self, descriptor: int, blocks: Iterator[int], size: int, block_bytes: int) -> None:
        super().__init__(name="storage-probe", daemon=True)
        self._descriptor, self._blocks, self._size = descriptor, blocks, size
        self.n_read = 0
        self.error: OSError | None = None
        # Pages are touched before the clock starts; mmap aligns them as O_DIRECT requires.
        self._buffer = mmap.mmap(-1, block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._use_huge_pages()
        for start in range(0, block_bytes, _PAGE_BYTES):
            self._buffer[start] = 0

    def run(self) -> None:
        try:
            with memoryview(self._buffer) as view:
                for offset in self._blocks:
                    self._read_block(view, offset)
        except OSError as error:
            self.error = error

    def _read_block(self, view: memoryview, offset: int) -> None:
        n_bytes = min(len(view), self._size - offset)
        done = 0
        while done < n_bytes:
            n_read = os.preadv(self._descriptor, [view[done:]], offset + done)
            n_left = n_bytes - done
            # O_DIRECT continues only at a whole page, so a partial page is read again.
            step = n_read if n_read >= n_left else n_read - n_read % _PAGE_BYTES
            if step == 0:
                raise OSError(errno.EIO, f"the file ended at {offset + done} of {self._size} bytes")
            done += step
        self.n_read += n_bytes

    def _use_huge_pages(self) -> None:
        with suppress(OSError):  # a kernel without them: small pages are only slower
            self._buffer.madvise(mmap.MADV_HUGEPAGE)


def _drop_cached(descriptor: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
