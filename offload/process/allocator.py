"""The C library's allocator: freed memory must not count as the process's own.

Only glibc has these calls; elsewhere they do nothing.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

from offload.units import MIB

_M_MMAP_THRESHOLD = -3  # of mallopt(3)
_LARGE_BLOCK_BYTES = 4 * MIB


def free_large_blocks_at_once() -> None:
    """Make glibc return every large block to the system when it is freed.

    By default glibc raises its threshold to the largest block freed so far, up to 32 MiB. Blocks
    of many sizes then share one heap, whose holes take up to as much memory as what is alive.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


def give_back_freed() -> None:
    """Return freed memory that the heap still keeps to the system."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
