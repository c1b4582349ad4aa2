"""Layers come to their addresses with the file's bytes, and use no additional memory.

What the pager shares with the streamer is tested in tests/offload/contract.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from mapped_weights import HUGE, MAP_PRIVATE, MAP_SHARED, mapped
from mapped_weights import memory_in as bytes_in
from paging import PAGE, check_memory, slot_ranges
from streaming import uneven_sizes
from weight_files import write_weights

from offload.paging.address_space import MappedRange
from offload.paging.pager import Pager
from offload.paging.plan import plan_paging
from offload.storage import aligned

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remainder", "flags"),
    [(0, MAP_SHARED), (PAGE, MAP_PRIVATE), (HUGE // 2, MAP_PRIVATE), (HUGE - PAGE, MAP_SHARED)],
)
def test_real_huge_pages(tmp_path: Path, remainder: int, flags: int) -> None:
    sizes = [[5_000_001, 3000, 7_000_000], [9_000_000], [100, 20_000], [HUGE], [3 * HUGE, 50]]
    weights = write_weights(tmp_path, sizes, n_files=2, resident=lambda i, j: (i, j) == (0, 1))
    with (
        mapped(weights, remainder, flags) as files,
        Pager(files.layers, [], files.mappings, 3, read_bytes=64 * PAGE, poison=True) as pager,
    ):
        files.run_passes(pager, 2)
        huge = bytes_in(slot_ranges(pager), "AnonHugePages")
        vmas = len(Path("/proc/self/maps").read_bytes().splitlines())
        for number in range(40):
            for index in range(len(sizes)):
                with pager.layer(index):
                    if number % 10 == 0:
                        files.check(index)
                        check_memory(pager, files)
        check_memory(pager, files)
        assert bytes_in(slot_ranges(pager), "AnonHugePages") == huge
        assert len(Path("/proc/self/maps").read_bytes().splitlines()) <= vmas + 4


@pytest.mark.usefixtures("small_huge_pages")
def test_hundreds_of_passes(tmp_path: Path) -> None:
    weights = write_weights(
        tmp_path, uneven_sizes(3, 5, limit=60_000), resident=lambda i, j: j == 1
    )
    with (
        mapped(weights) as files,
        Pager(files.layers, [], files.mappings, 2, poison=True) as pager,
    ):
        files.run_passes(pager)
        vmas = len(Path("/proc/self/maps").read_bytes().splitlines())
        for _ in range(400):
            files.run_passes(pager)
        check_memory(pager, files)
        assert len(Path("/proc/self/maps").read_bytes().splitlines()) <= vmas + 6


@pytest.mark.parametrize("page", [4 * PAGE, 16 * PAGE])
def test_larger_system_pages(tmp_path: Path, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aligned, "PAGE_BYTES", page)
    weights = write_weights(tmp_path, uneven_sizes(6, 3, 300_000), resident=lambda i, j: j == 1)
    with mapped(weights) as files:
        # The tail of the last page: a mapping covers it on systems with large pages.
        files.mappings = {
            path: [MappedRange(m.address, -(-m.n_bytes // page) * page, m.file_offset)]
            for path, (m,) in files.mappings.items()
        }
        plan = plan_paging(files.layers, [], files.mappings)
        assert any(plan.layers)
        for layer in filter(None, plan.layers):
            for read, part in zip(layer.reads.extents, layer.parts, strict=True):
                assert (
                    read.file_offset % page == part.n_bytes % page == part.slot_offset % page == 0
                )
        for part in plan.resident:
            assert part.file_offset % page == part.n_bytes % page == 0
