"""Memory for reads that bypass the page cache: aligned, on huge pages."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

import numpy as np

from offload.units import MIB

# Alignment of offsets, lengths and buffers of reads, as devices require it. Covers their logical
# blocks of 512 and 4096 bytes; a file system that asks for more refuses the probe in DirectFile and
# gets buffered reads.
ALIGNMENT = 4096
# Memory is mapped in whole pages (4, 16 or 64 KiB on arm64), and reads go into them.
PAGE_BYTES = max(mmap.PAGESIZE, ALIGNMENT)
# One entry of the table above pages of 4 KiB, and a run of contiguous entries of 16 or 64 KiB on
# arm64. One entry above those would be 32 or 512 MiB: more than many layers have.
HUGE_PAGE_BYTES = 2 * MIB

_MAX_POPULATING_THREADS = 4
_MIN_PARALLEL_BYTES = 32 * MIB  # 2 ms of memory that was in use before, to be worth the threads

# Constants that the mmap module lacks.
_MADV_WIPEONFORK = 18  # Linux 4.14
_MADV_POPULATE_WRITE = 23  # Linux 5.14


class HostMemory(Protocol):
    """Memory that files are read into: an AlignedBuffer, or an object with the same members."""

    address: int

    @property
    def view(self) -> memoryview: ...

    def close(self) -> None: ...


def align_down(offset: int) -> int:
    """Return the largest multiple of ALIGNMENT that is at most `offset`."""
    return offset - offset % ALIGNMENT


def align_up(offset: int) -> int:
    """Return the smallest multiple of ALIGNMENT that is at least `offset`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def page_down(address: int) -> int:
    """Return the beginning of the page at `address`."""
    return address - address % PAGE_BYTES


def page_up(address: int) -> int:
    """Return the beginning of the first page that is not below `address`."""
    return page_down(address + PAGE_BYTES - 1)


def buffer_bytes(n_bytes: int) -> int:
    """Return the memory that `AlignedBuffer(n_bytes)` really takes."""
    return page_up(n_bytes)


def populate(address: int, n_bytes: int) -> None:
    """Back fresh memory with zeroed pages: all pages that have a byte of it.

    It takes seconds for gigabytes, in which other threads run.
    Raises MemoryError if the memory cannot be had.
    """
    libc = _libc()
    page = page_down(address)  # madvise begins at a page; existing content stays
    while libc.madvise(page, address + n_bytes - page, _MADV_POPULATE_WRITE):
        number = ctypes.get_errno()
        if number == errno.EINVAL:  # an older kernel
            libc.memset(address, 0, n_bytes)
            return
        if number not in (errno.EINTR, errno.EAGAIN):
            raise MemoryError(f"cannot commit {n_bytes} bytes of memory")


def populate_in_parallel(address: int, n_bytes: int) -> None:
    """Populate with several threads: a virtual machine's fresh memory takes 2.3 s per GiB with one
    thread and 1.3 s with two, because each waits for the host (docs/benchmarks.md).
    Raises MemoryError."""
    n_threads = min(_MAX_POPULATING_THREADS, len(os.sched_getaffinity(0)))
    part_bytes = -(-n_bytes // n_threads // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    if n_threads == 1 or not part_bytes or n_bytes < _MIN_PARALLEL_BYTES:
        populate(address, n_bytes)
        return
    starts = range(0, n_bytes, part_bytes)
    with ThreadPoolExecutor(n_threads, "specdec-populate") as pool:
        for _ in pool.map(
            lambda start: populate(address + start, min(part_bytes, n_bytes - start)), starts
        ):
            pass


@functools.cache
def _libc() -> ctypes.CDLL:
    """Return libc, whose calls release the interpreter lock."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    return libc


class AlignedBuffer:
    """Anonymous memory aligned to 2 MiB, on huge pages as far as they fit.

    Args:
        is_committed: memory runs out here or never (MemoryError); else pages are taken as they are
            written to, or by `populate`.
        is_huge: False if only parts of it are used, in no order.
        in_children: whether forked processes see its content instead of zeros. Then, what is
            written meanwhile takes its memory twice.
    """

    def __init__(
        self,
        n_bytes: int,
        *,
        is_committed: bool = True,
        is_huge: bool = True,
        in_children: bool = True,
    ) -> None:
        if n_bytes < 0:
            raise ValueError(f"a buffer cannot have {n_bytes} bytes")
        self.n_bytes = n_bytes
        size = buffer_bytes(max(n_bytes, 1))
        # The slack for the alignment is address space only: it is never touched. MAP_PRIVATE,
        # because Python's default is shared memory, which has its own rules for huge pages.
        try:
            self._map = mmap.mmap(
                -1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except OSError as error:  # a limit of address space (ulimit -v), or no overcommitment
            raise MemoryError(f"cannot map {size} bytes of memory") from error
        address = int(np.frombuffer(self._map, dtype=np.uint8).ctypes.data)
        start = -address % HUGE_PAGE_BYTES
        self.address, self._offset = address + start, start
        n_huge = size - size % HUGE_PAGE_BYTES if is_huge else 0
        if n_huge:
            self._advise(getattr(mmap, "MADV_HUGEPAGE", None), start, n_huge)
        if size > n_huge:  # a huge page here would take memory that is not reserved
            self._advise(getattr(mmap, "MADV_NOHUGEPAGE", None), start + n_huge, size - n_huge)
        self._view = memoryview(self._map)[start : start + size]
        if is_committed:
            populate(self.address, size)
        if not in_children:
            # Not MADV_DONTFORK: the child would map other things in the hole, and unmap them when
            # it collects this.
            self._advise(_MADV_WIPEONFORK, start, size)

    @property
    def view(self) -> memoryview:
        """The whole memory, writable: `buffer_bytes(n_bytes)` bytes."""
        return self._view

    def release(self, start: int, n_bytes: int) -> None:
        """Give the whole pages of a part back to the system; they are zeros when next used."""
        offset = self._offset + page_up(start)
        size = self._offset + page_down(start + n_bytes) - offset
        if size > 0:
            self._advise(getattr(mmap, "MADV_DONTNEED", None), offset, size)

    def close(self) -> None:
        """Free the memory, or leave it to the last view of it that is still alive."""
        try:
            self._view.release()
            self._map.close()
        except BufferError:
            pass  # a tensor made from a view keeps the map alive; it is freed with that tensor

    def _advise(self, option: int | None, start: int, size: int) -> None:
        if option is not None:
            with suppress(OSError):  # this kernel does not know the advice
                self._map.madvise(option, start, size)
