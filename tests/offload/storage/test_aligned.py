"""Aligned memory."""

from __future__ import annotations

import numpy as np
import pytest

from offload.storage.aligned import (
    HUGE_PAGE_BYTES,
    PAGE_BYTES,
    AlignedBuffer,
    align_down,
    align_up,
    buffer_bytes,
)


@pytest.mark.parametrize("n_bytes", [0, 1, 4096, 4097, 2**21 - 1, 2**21, 2**21 + 1, 5 * 2**20])
def test_buffers_are_aligned_and_writable(n_bytes: int) -> None:
    buffer = AlignedBuffer(n_bytes)
    array = np.frombuffer(buffer.view, dtype=np.uint8)
    assert array.ctypes.data == buffer.address
    assert buffer.address % HUGE_PAGE_BYTES == 0
    assert len(buffer.view) == buffer_bytes(max(n_bytes, 1)) >= n_bytes
    assert not array.any()
    array[-1] = 7
    assert buffer.view[len(buffer.view) - 1] == 7


def test_rounding() -> None:
    assert [align_up(n) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
    assert [align_down(n) for n in (0, 4095, 4096, 8191)] == [0, 0, 4096, 4096]
    assert buffer_bytes(0) == 0
    assert buffer_bytes(PAGE_BYTES + 1) == 2 * PAGE_BYTES
    assert buffer_bytes(2**21 + 1) == 2**21 + PAGE_BYTES


def test_closing_leaves_the_memory_to_a_living_view() -> None:
    buffer = AlignedBuffer(8192)
    array = np.frombuffer(buffer.view[:100], dtype=np.uint8)
    buffer.close()
    buffer.close()
    array[:] = 3
    assert array.sum() == 300


def test_impossible_sizes() -> None:
    with pytest.raises(ValueError, match="-1"):
        AlignedBuffer(-1)
    with pytest.raises((MemoryError, OSError)):
        AlignedBuffer(2**46)
