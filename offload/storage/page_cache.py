"""A file's pages in the page cache, which count in the memory limit of the process that read it."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

_THREAD_IO = Path("/proc/thread-self/io")
_DROP_SECONDS = 0.01
"""Interval of dropping pages; at 3 GB/s reads fetch 30 MB meanwhile."""


def drop_cached(descriptor: int, offset: int = 0, n_bytes: int = 0) -> None:
    """Drop all pages that have a byte of a range (0: to the end), except mapped and dirty ones. The
    range is extended to whole pages, because the kernel ignores partial ones."""
    if hasattr(os, "posix_fadvise"):
        start = offset - offset % mmap.PAGESIZE
        n_whole = n_bytes and -(-(offset + n_bytes - start) // mmap.PAGESIZE) * mmap.PAGESIZE
        os.posix_fadvise(descriptor, start, n_whole, os.POSIX_FADV_DONTNEED)


def drop_files(paths: Iterable[Path]) -> None:
    """Drop these files from the page cache, as far as they can be opened."""
    for path in paths:
        with suppress(OSError), path.open("rb", buffering=0) as file:
            drop_cached(file.fileno())


@contextmanager
def dropping_behind(paths: Iterable[Path]) -> Iterator[None]:
    """Drop what is read of these files in the block, soon after it has been read.

    For code of other libraries that reads through the page cache.
    """
    files, is_over = tuple(paths), threading.Event()

    def drop() -> None:
        while not is_over.wait(_DROP_SECONDS):
            drop_files(files)

    thread = threading.Thread(target=drop, name="specdec-drop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        drop_files(files)


def is_cached(descriptor: int, offset: int) -> bool:
    """Return whether the page at `offset` is cached, or unknown. Source: mincore(2).

    The kernel reports pages as cached if the user neither owns the file nor may write to it.
    """
    result = ctypes.create_string_buffer(1)
    start = offset - offset % mmap.ALLOCATIONGRANULARITY  # on Linux, a page's beginning
    try:
        with mmap.mmap(descriptor, offset - start + 1, prot=mmap.PROT_READ, offset=start) as pages:
            address = np.frombuffer(pages, np.uint8).ctypes.data
            return bool(_libc().mincore(address, 1, result)) or bool(result.raw[0] & 1)
    except (OSError, ValueError):  # it cannot be mapped, or is empty
        return True


def bytes_from_devices() -> int | None:
    """Return the bytes that this thread has read from devices, or None. Source: proc_pid_io(5)."""
    try:
        lines = _THREAD_IO.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    return libc
