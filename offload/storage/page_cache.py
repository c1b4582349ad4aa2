"""What the page cache has of a file, which counts in the memory limit of whoever had it read."""

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
"""At 3 GB/s reads bring 30 MB meanwhile."""


def drop_cached(descriptor: int, offset: int = 0, n_bytes: int = 0) -> None:
    """Let go of all pages that have a byte of a range (0: to the end); what is mapped, or not yet
    written to storage, stays. The kernel leaves pages alone of which it is given a part only."""
    if hasattr(os, "posix_fadvise"):
        start = offset - offset % mmap.PAGESIZE
        n_whole = n_bytes and -(-(offset + n_bytes - start) // mmap.PAGESIZE) * mmap.PAGESIZE
        os.posix_fadvise(descriptor, start, n_whole, os.POSIX_FADV_DONTNEED)


def drop_files(paths: Iterable[Path]) -> None:
    """Let go of all that the page cache has of these files, as far as they can be opened."""
    for path in paths:
        with suppress(OSError), path.open("rb", buffering=0) as file:
            drop_cached(file.fileno())


@contextmanager
def dropping_behind(paths: Iterable[Path]) -> Iterator[None]:
    """Let go of what is read of these files in the block, soon after it has been read.

    For code that is not ours to change, and reads through the page cache.
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
    """Whether the page at `offset` is there, or nobody can tell. Source: mincore(2).

    The kernel says so of files that the user neither owns nor may write to.
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
    """What this thread has had read; None where nobody counts it. Source: proc_pid_io(5)."""
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
