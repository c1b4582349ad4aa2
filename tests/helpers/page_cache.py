"""Cached pages of a file, and a file without any. Source: mincore(2)."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from offload.storage.page_cache import drop_cached

_SMALLEST_PAGE_BYTES = 4096
_UNWRITTEN = 0xFF  # the kernel sets only the lowest bit


def n_cached(path: Path) -> int:
    """Return the cached pages in the second half of a file: reading the header also cached some of
    the first half."""
    libc = ctypes.CDLL(None)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        # An emulator may forward the call to a kernel with smaller pages, which reports more.
        max_count = -(-len(pages) // min(mmap.PAGESIZE, _SMALLEST_PAGE_BYTES))
        actual = (ctypes.c_ubyte * max_count)(*[_UNWRITTEN] * max_count)
        address = np.frombuffer(pages, np.uint8).ctypes.data
        assert not libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(pages)), actual)
    said = [page for page in actual if page != _UNWRITTEN]
    return sum(page & 1 for page in said[len(said) // 2 :])


def forget(path: Path) -> None:
    """Drop a file from the page cache; skip the test on file systems that cannot, or live there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        drop_cached(descriptor)
    finally:
        os.close(descriptor)
    if n_cached(path):
        pytest.skip(f"the page cache keeps {path}, as on a tmpfs")
