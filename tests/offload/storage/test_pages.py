"""Memory and page cache use the system's pages, larger than blocks on some arm64 systems."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from system_probes import needs_advice

from offload.storage import aligned, page_cache
from offload.storage.aligned import ALIGNMENT, PAGE_BYTES, buffer_bytes, populate
from offload.storage.page_cache import drop_cached, is_cached

SIZES = [size for size in [4096, 16_384, 65_536] if size >= mmap.PAGESIZE]
page_sizes = pytest.mark.parametrize("page", SIZES)


def test_a_page_is_the_systems() -> None:
    assert PAGE_BYTES % mmap.PAGESIZE == PAGE_BYTES % ALIGNMENT == 0


@given(st.sampled_from(SIZES), st.integers(0, 1 << 22))
def test_buffers_take_whole_pages(page: int, n_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aligned, "PAGE_BYTES", page)
        taken = buffer_bytes(n_bytes)
        assert taken % page == 0
        assert n_bytes <= taken < n_bytes + page


@page_sizes
@pytest.mark.parametrize(
    ("offset", "n_bytes"),
    [(0, 4096), (4096, 4096), (12_288, 8192), (61_440, 65_536), (65_536, 131_072), (1, 1)],
)
def test_all_pages_of_a_range_are_dropped(
    page: int, offset: int, n_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(mmap, "PAGESIZE", page)
    monkeypatch.setattr(os, "posix_fadvise", lambda _, start, n, advice: calls.append((start, n)))
    drop_cached(3, offset, n_bytes)
    ((start, n_dropped),) = calls
    assert start % page == n_dropped % page == 0  # a partial page stays in place
    assert start <= offset < start + page
    assert start + n_dropped - page < offset + n_bytes <= start + n_dropped


def test_without_a_length_all_behind_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, start, n, advice: calls.append((start, n)))
    drop_cached(3)
    assert calls == [(0, 0)]


@page_sizes
@pytest.mark.parametrize("offset", [0, 4096, 12_288, 65_536, 69_632, 98_304])
def test_the_kernel_is_asked_of_whole_pages(
    page: int, offset: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mincore(2) refuses other addresses, which would count as a cached page."""
    asked: list[int] = []
    monkeypatch.setattr(mmap, "ALLOCATIONGRANULARITY", page)
    libc = SimpleNamespace(mincore=lambda address, n, actual: asked.append(address) or 0)
    monkeypatch.setattr(page_cache, "_libc", lambda: libc)
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 17))
    with path.open("rb") as file:
        assert not is_cached(file.fileno(), offset)
    assert [address % mmap.PAGESIZE for address in asked] == [0]


@given(
    st.integers(0, 3 * PAGE_BYTES),
    st.integers(1, 3 * PAGE_BYTES),
    st.sampled_from([512, 4096, 9000]),
)
def test_memory_is_committed_wherever_a_part_begins(offset: int, n_bytes: int, step: int) -> None:
    """Two readers fill parts of one page: neither overwrites the other's bytes."""
    buffer = aligned.AlignedBuffer(6 * PAGE_BYTES, is_committed=False)
    bytes_there = np.frombuffer(buffer.view, np.uint8)
    bytes_there[:] = 7
    for start in range(offset, offset + n_bytes, step):
        populate(buffer.address + start, min(step, offset + n_bytes - start))
    assert (bytes_there == 7).all()
    del bytes_there
    buffer.close()


@needs_advice
@pytest.mark.parametrize("offset", [0, 100, 4096, PAGE_BYTES + 5])
def test_an_older_kernel_is_given_no_more_than_the_part(
    offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without MADV_POPULATE_WRITE memory is written to, so it must not contain other bytes."""
    monkeypatch.setattr(aligned, "_MADV_POPULATE_WRITE", 12345)
    buffer = aligned.AlignedBuffer(4 * PAGE_BYTES, is_committed=False)
    bytes_there = np.frombuffer(buffer.view, np.uint8)
    bytes_there[:] = 7
    populate(buffer.address + offset, PAGE_BYTES)
    assert not bytes_there[offset : offset + PAGE_BYTES].any()
    assert (bytes_there[:offset] == 7).all()
    assert (bytes_there[offset + PAGE_BYTES :] == 7).all()
    del bytes_there
    buffer.close()
