"""Layers come to their addresses with the file's bytes, and use no additional memory.

What the pager shares with the streamer (the ring, the readers) is tested there.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mapped_weights import HUGE, MAP_PRIVATE, MAP_SHARED, mapped
from mapped_weights import memory_in as bytes_in
from paging import PAGE, check_memory, page_weights, slot_ranges
from streaming import uneven_sizes
from weight_files import FaultyReads, write_weights

from offload.paging.address_space import MappedRange
from offload.paging.pager import Pager
from offload.paging.plan import paging_overhead_bytes, plan_paging
from offload.storage import aligned
from offload.storage.aligned import buffer_bytes
from offload.storage.direct_io import DirectFile
from offload.storage.reading import resident_footprint

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.mark.parametrize("n_slots", range(1, 17))
@pytest.mark.usefixtures("small_huge_pages")
def test_every_layer_count_and_ring_depth(tmp_path: Path, n_slots: int) -> None:
    for n_layers in range(1, 17):
        folder = tmp_path / str(n_layers)
        folder.mkdir()
        weights = write_weights(
            folder, uneven_sizes(n_layers, 17 * n_layers + n_slots, limit=60_000)
        )
        with (
            mapped(weights, PAGE * n_slots) as files,
            Pager(
                files.layers,
                [],
                files.mappings,
                n_slots,
                read_bytes=4 * PAGE,
                n_readers=3,
                poison=True,
            ) as pager,
        ):
            files.run_passes(pager, 3)
            assert pager.stats.passes == 3
            for index in range(n_layers):
                files.check_absent(index)
            check_memory(pager, files)


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
        for number in range(100):
            for index in range(len(sizes)):
                with pager.layer(index):
                    if number % 25 == 0:
                        files.check(index)
                        check_memory(pager, files)
        check_memory(pager, files)
        assert bytes_in(slot_ranges(pager), "AnonHugePages") == huge
        assert len(Path("/proc/self/maps").read_bytes().splitlines()) <= vmas + 4


@pytest.mark.usefixtures("small_huge_pages")
def test_thousands_of_passes(tmp_path: Path) -> None:
    weights = write_weights(
        tmp_path, uneven_sizes(3, 5, limit=60_000), resident=lambda i, j: j == 1
    )
    with (
        mapped(weights) as files,
        Pager(files.layers, [], files.mappings, 2, poison=True) as pager,
    ):
        files.run_passes(pager)
        vmas = len(Path("/proc/self/maps").read_bytes().splitlines())
        for _ in range(2000):
            files.run_passes(pager)
        check_memory(pager, files)
        assert len(Path("/proc/self/maps").read_bytes().splitlines()) <= vmas + 6


@pytest.mark.parametrize("direct", [True, False])
def test_both_read_modes(tmp_path: Path, direct: bool) -> None:
    weights = write_weights(
        tmp_path, uneven_sizes(5, 1, limit=60_000), n_files=2, resident=lambda i, j: i == 1
    )
    with (
        mapped(weights) as files,
        Pager(files.layers, [], files.mappings, 2, storage=partial(DirectFile, direct=direct)) as p,
    ):
        files.run_passes(p, 4)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
@pytest.mark.usefixtures("small_huge_pages")
def test_random_layouts(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    size = st.sampled_from([0, 1, 7, 4095, 4096, 4097, 16_384, 70_000]) | st.integers(0, 90_000)
    sizes = data.draw(st.lists(st.lists(size, max_size=4), min_size=1, max_size=7))
    chosen = data.draw(st.sets(st.tuples(st.integers(0, 6), st.integers(0, 3))))
    weights = write_weights(
        tmp_path_factory.mktemp("w"),
        sizes,
        n_files=data.draw(st.integers(1, 3)),
        padding=data.draw(st.integers(1, 9000)),
        resident=lambda i, j: (i, j) in chosen,
    )
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    n_slots = data.draw(st.integers(1, 8))
    faulty = FaultyReads(
        lambda call, length: rng.choice([None, None, 4096, rng.randint(1, length)])
    )
    if not any(any(layer) for layer in sizes):
        return
    with mapped(weights, PAGE * data.draw(st.integers(0, 511))) as files:
        planned = resident_footprint([r for layer in files.layers for r in layer.resident_records])
        streamed = [layer.slot_bytes for layer in files.layers if layer.slot_bytes]
        planned += min(n_slots, len(streamed)) * buffer_bytes(max(streamed, default=0))
        with Pager(
            files.layers,
            [],
            files.mappings,
            n_slots,
            read_bytes=PAGE * data.draw(st.sampled_from([1, 2, 7, 2048])),
            n_readers=data.draw(st.integers(1, 5)),
            storage=faulty.storage,
            poison=True,
        ) as pager:
            files.run_passes(pager, 2, stop_before=data.draw(st.integers(0, len(sizes))))
            files.run_passes(pager, 2)
            check_memory(pager, files)
            taken = pager.resident_bytes + pager.ring_bytes
            assert taken <= planned + paging_overhead_bytes(files.layers, n_slots)
            for index in range(len(sizes)):
                files.check_absent(index)


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


def test_metrics(tmp_path: Path) -> None:
    with (
        mapped(page_weights(tmp_path)) as files,
        Pager(files.layers, [], files.mappings, 1, read_bytes=PAGE) as pager,
    ):
        files.run_passes(pager, 2)
        before = pager.stats
        assert before.passes == 2
        assert before.bytes_read >= 2 * 19 * PAGE
        assert before.stall_seconds > 0
        assert before.read_seconds > 0
        files.run_passes(pager)
        span = pager.stats - before
        assert span.passes == 1
        assert span.bytes_read <= 2 * 19 * PAGE
