"""Reads of a few bytes of a large file, without the kernel's read-ahead."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

_PAGE = mmap.PAGESIZE


def read_part(path: Path, offset: int, n_bytes: int) -> bytes:
    """Read `n_bytes` from `offset` on, fewer at the file's end, and leave none in the page cache.

    Cached pages count in a memory cgroup, and read-ahead is 64 KiB. Raises OSError.
    """
    with path.open("rb", buffering=0) as file:
        descriptor = file.fileno()
        if not hasattr(os, "posix_fadvise"):
            return os.pread(descriptor, n_bytes, offset)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # read nothing ahead
        result = os.pread(descriptor, n_bytes, offset)
        # Includes the partial pages at both ends: DONTNEED would leave those.
        start, end = offset // _PAGE * _PAGE, -(-(offset + n_bytes) // _PAGE) * _PAGE
        os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)
        return result
