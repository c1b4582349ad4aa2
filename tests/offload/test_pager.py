"""Layers come to their addresses with the file's bytes, leave without a trace, and cost no memory.

What the pager shares with the streamer (the ring, the readers) is tested there.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import os
import random
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mapped_weights import HUGE, MAP_PRIVATE, MAP_SHARED, MappedWeights, is_readable, mapped
from mapped_weights import memory_in as bytes_in
from weight_files import FaultyReads, Weights, write_weights

from offload import address_space, paging_plan
from offload.address_space import AddressSpaceError, MappedRange
from offload.direct_io import DirectFile, StorageError, buffer_bytes
from offload.index import TensorRecord
from offload.pager import Pager
from offload.paging_plan import paging_overhead_bytes, plan_paging
from offload.plan import LayerWeights
from offload.reading import resident_footprint
from offload.slots import StreamerClosed

PAGE = address_space.PAGE_BYTES


def reader_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("specdec-reader")]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> object:
    yield
    if reader_threads():
        gc.collect()
    for thread in reader_threads():
        thread.join(5)
    assert not reader_threads()


@pytest.fixture
def small_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads, bodies and tails in tensors of a few pages."""
    monkeypatch.setattr(paging_plan, "HUGE_PAGE_BYTES", 4 * PAGE)


def slot_ranges(pager: Pager) -> list[tuple[int, int]]:
    ring = pager._ring
    return [(s.buffer.address, len(s.buffer.view)) for s in ring.slots] if ring else []


def check_memory(pager: Pager, files: MappedWeights) -> None:
    """Assert that exactly the planned anonymous memory is there, wherever its pages are."""
    found = bytes_in([*slot_ranges(pager), *files.ranges.values()])
    assert found == pager.resident_bytes + pager.ring_bytes


def uneven_sizes(n_layers: int, seed: int, most: int = 60_000) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randint(1, most) for _ in range(rng.randint(1, 3))] for _ in range(n_layers)]


class Gate:
    """Reads from call `n_open` on wait until the gate is opened."""

    def __init__(self, n_open: int) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        self.n_open = n_open
        self.storage = FaultyReads(self._fault).storage

    def _fault(self, call: int, length: int) -> None:
        if call >= self.n_open and not self.opened.is_set():
            self.reached.set()
            self.opened.wait()


# --- contents ------------------------------------------------------------------------------


@pytest.mark.parametrize("n_slots", range(1, 17))
@pytest.mark.usefixtures("small_huge_pages")
def test_every_layer_count_and_ring_depth(tmp_path: Path, n_slots: int) -> None:
    for n_layers in range(1, 17):
        folder = tmp_path / str(n_layers)
        folder.mkdir()
        weights = write_weights(folder, uneven_sizes(n_layers, 17 * n_layers + n_slots))
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
            files.walk(pager, 3)
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
        files.walk(pager, 2)
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
    weights = write_weights(tmp_path, uneven_sizes(3, 5), resident=lambda i, j: j == 1)
    with (
        mapped(weights) as files,
        Pager(files.layers, [], files.mappings, 2, poison=True) as pager,
    ):
        files.walk(pager)
        vmas = len(Path("/proc/self/maps").read_bytes().splitlines())
        for _ in range(2000):
            files.walk(pager)
        check_memory(pager, files)
        assert len(Path("/proc/self/maps").read_bytes().splitlines()) <= vmas + 6


@pytest.mark.parametrize("direct", [True, False])
def test_both_ways_of_reading(tmp_path: Path, direct: bool) -> None:
    weights = write_weights(tmp_path, uneven_sizes(5, 1), n_files=2, resident=lambda i, j: i == 1)
    with (
        mapped(weights) as files,
        Pager(files.layers, [], files.mappings, 2, storage=partial(DirectFile, direct=direct)) as p,
    ):
        files.walk(p, 4)


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
            files.walk(pager, 2, stop_before=data.draw(st.integers(0, len(sizes))))
            files.walk(pager, 2)
            check_memory(pager, files)
            taken = pager.resident_bytes + pager.ring_bytes
            assert taken <= planned + paging_overhead_bytes(files.layers, n_slots)
            for index in range(len(sizes)):
                files.check_absent(index)


@pytest.mark.parametrize("page", [4 * PAGE, 16 * PAGE])
def test_larger_system_pages(tmp_path: Path, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_space, "PAGE_BYTES", page)
    weights = write_weights(tmp_path, uneven_sizes(6, 3, 300_000), resident=lambda i, j: j == 1)
    with mapped(weights) as files:
        # The tail of the last page: a mapping covers it where pages are so large.
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


# --- what is touched, and what is not --------------------------------------------------------


def one_file(path: Path, sizes: list[int], padding: int = 0) -> tuple[list[TensorRecord], bytes]:
    """Tensors one after the other in one file."""
    content = os.urandom(padding + sum(sizes))
    path.write_bytes(content)
    offsets = [padding + sum(sizes[:number]) for number in range(len(sizes))]
    return [
        TensorRecord(f"t{number}", "U8", (size,), path, offset, size)
        for number, (size, offset) in enumerate(zip(sizes, offsets, strict=True))
    ], content


def test_neighbours_share_pages_with_what_stays(tmp_path: Path) -> None:
    path = tmp_path / "f"
    records, content = one_file(path, [10_000, 5_000, 30_000, 100, 40_000, 9_000, 7_777], 123)
    head, norm, a, small, b, tail, last = records
    weights = Weights((LayerWeights((a, small), frozenset({"t3"})), LayerWeights((b, last))), {})
    with mapped(weights) as files:
        address, size = files.ranges[path]
        with Pager(
            files.layers, [norm], files.mappings, 2, untouched=[head, tail], poison=True
        ) as pager:
            for index in (0, 1, 0, 1):
                with pager.layer(index):
                    for record in files.layers[index].tensors:
                        start = record.offset
                        found = ctypes.string_at(address + start, record.n_bytes)
                        assert found == content[start : start + record.n_bytes]
                for record in (head, norm, small, tail):  # always there
                    start = record.offset
                    found = ctypes.string_at(address + start, record.n_bytes)
                    assert found == content[start : start + record.n_bytes]
            assert ctypes.string_at(address + len(content), size - len(content)).count(0) == (
                size - len(content)
            )
            # Pages that hold nothing else than `head` and `tail` are still the file's.
            backed = bytes_in([(address, size)], "Shared_Clean")
            backed += bytes_in([(address, size)], "Private_Clean")
            assert backed >= PAGE
            check_memory(pager, files)


def test_gaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies between two tensors of a layer is read along: padding, the layer's own tensors."""
    path = tmp_path / "f"
    records, _ = one_file(path, [50_000, 20_000, 50_000, 20_000, 50_000])
    first, between, second, gap, third = records
    files = {path: [MappedRange(1 << 40, 200_000, 0)]}

    def n_parts(layer: LayerWeights, resident=(), untouched=()) -> int:
        (paged,) = plan_paging([layer], resident, files, untouched).layers
        assert paged is not None
        return len(paged.parts)

    whole = LayerWeights((first, between, second, third), frozenset({"t1"}))
    assert n_parts(whole) == 1
    assert n_parts(whole, resident=[gap]) == 2
    assert n_parts(whole, untouched=[gap]) == 2
    assert n_parts(whole, resident=[between]) == 2  # also somebody else's: it must stay
    bare = LayerWeights((first, second, third))
    assert n_parts(bare) == 1
    assert n_parts(bare, untouched=[between, gap]) == 3
    other = LayerWeights((gap,))
    plan = plan_paging([whole, other], (), files)
    assert [len(layer.parts) for layer in plan.layers if layer] == [2, 1]
    monkeypatch.setattr("offload.spans.MAX_GAP_BYTES", 19_999)
    assert n_parts(whole) == 3


def test_tensors_that_cannot_be_paged(tmp_path: Path) -> None:
    path = tmp_path / "f"
    (a, b, c), _ = one_file(path, [50_000, 20_000, 50_000])
    files = {path: [MappedRange(1 << 40, 122_880, 0)]}
    for layers, resident in (
        ([LayerWeights((a,)), LayerWeights((a, b))], []),
        ([LayerWeights((a, b))], [b]),
    ):
        with pytest.raises(ValueError, match="also another layer's or resident"):
            plan_paging(layers, resident, files)
    crossing = TensorRecord("x", "U8", (9,), path, 49_995, 9)
    with pytest.raises(ValueError, match="overlap"):
        plan_paging([LayerWeights((a, b))], [crossing], files)
    shared = LayerWeights((a,), frozenset({"t0"}))
    assert len(plan_paging([shared, shared], [a], files).resident) == 1
    for wrong in (
        {},
        {path: []},
        {path: [MappedRange(1 << 40, 8192, 0)]},
        {path: [MappedRange(1 << 40, 122_880, 0), MappedRange(1 << 41, 122_880, 0)]},
        {path: [MappedRange(1 << 40, 118_784, 4096)]},
    ):
        with pytest.raises(AddressSpaceError, match="mapped (0|2) times"):
            plan_paging([LayerWeights((a, b))], [c], wrong)


def test_a_layer_smaller_than_a_page_is_resident(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[100], [30_000], [], [0], [8191]], padding=1)
    with (
        mapped(weights) as files,
        Pager(files.layers, [], files.mappings, 5, poison=True) as pager,
    ):
        assert pager.n_slots == 2
        files.check(0)
        files.walk(pager, 3)


def test_everything_resident_needs_no_ring(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[9000, 0], [5000]], resident=lambda i, j: True)
    seen: list[tuple[int, int]] = []
    with (
        mapped(weights) as files,
        Pager(
            files.layers,
            [],
            files.mappings,
            0,
            progress=lambda done, all_: seen.append((done, all_)),
        ) as pager,
    ):
        assert not reader_threads()
        files.check_resident()
        files.walk(pager, 3)
        assert (pager.n_slots, pager.ring_bytes, pager.stats.passes) == (0, 0, 3)
        check_memory(pager, files)
    assert seen[-1][0] == seen[-1][1] >= 14_000


def test_an_overhead_that_is_no_overhead(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[50 * HUGE + 1], [3 * HUGE]])
    for n_slots in (1, 2, 3):
        overhead = paging_overhead_bytes(weights.layers, n_slots)
        assert 0 < overhead <= min(n_slots, 2) * HUGE + 4 * PAGE
    resident = [layer.with_resident(frozenset(r.name for r in layer.tensors))
                for layer in weights.layers]  # fmt: skip
    assert paging_overhead_bytes(resident, 3) <= 2 * PAGE
    assert paging_overhead_bytes([], 3) == 0


# --- storage that fails ----------------------------------------------------------------------


def _raise_if(condition: bool) -> None:
    if condition:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def small_weights(folder: Path) -> Weights:
    return write_weights(folder, [[29_000, 100], [25_000], [42_000], [300], [8200, 30_000]],
                         n_files=2)  # fmt: skip


@pytest.mark.parametrize("n_slots", [1, 2, 3])
@pytest.mark.parametrize("resume", [0, None])
@pytest.mark.usefixtures("small_huge_pages")
def test_a_transient_error_at_every_read(tmp_path: Path, n_slots: int, resume: int | None) -> None:
    weights = small_weights(tmp_path)
    with mapped(weights, PAGE) as files:
        n_calls = []
        for failing in range(-1, 1000):
            reads = FaultyReads(lambda call, length, n=failing: _raise_if(call == n))
            try:
                pager = Pager(
                    files.layers,
                    [],
                    files.mappings,
                    n_slots,
                    read_bytes=2 * PAGE,
                    storage=reads.storage,
                    poison=True,
                )
            except StorageError:
                assert failing >= 0  # an edge that is resident
                continue
            with pager:
                n_errors = 0
                for _ in range(3):
                    index = 0
                    while index < len(files.layers):
                        try:
                            with pager.layer(index):
                                files.check(index)
                            index += 1
                        except StorageError:
                            n_errors += 1
                            index = index if resume is None else resume
                check_memory(pager, files)
                n_calls.append(reads.n_calls)
                assert n_errors == (1 if failing >= 0 else 0)
            if failing > 40:
                break


def test_a_persistent_error_and_the_recovery(tmp_path: Path) -> None:
    weights = small_weights(tmp_path)
    broken = threading.Event()
    reads = FaultyReads(lambda call, length: _raise_if(broken.is_set()))
    with (
        mapped(weights) as files,
        Pager(files.layers, [], files.mappings, 2, read_bytes=PAGE, storage=reads.storage) as pager,
    ):
        files.walk(pager, 2)
        broken.set()
        for _ in range(3):
            with pytest.raises(StorageError, match="Input/output error"):
                files.walk(pager, 3)
            check_memory(pager, files)
        pager.restart()
        with pytest.raises(StorageError, match="Input/output error"):
            files.walk(pager)
        broken.clear()
        files.walk(pager, 2)


@pytest.mark.parametrize("seed", range(4))
def test_short_and_interrupted_reads_change_nothing(tmp_path: Path, seed: int) -> None:
    weights = write_weights(tmp_path, uneven_sizes(6, seed), n_files=2, resident=lambda i, j: j > 1)
    rng = random.Random(seed)

    def fault(call: int, length: int) -> int | None:
        if rng.random() < 0.2:
            raise InterruptedError(errno.EINTR, "interrupted")
        return rng.choice([None, rng.randint(1, length), 4096])

    reads = FaultyReads(fault)
    with (
        mapped(weights) as files,
        Pager(
            files.layers,
            [],
            files.mappings,
            3,
            read_bytes=2 * PAGE,
            storage=reads.storage,
            poison=True,
        ) as pager,
    ):
        files.walk(pager, 5)


class WatchedReads:
    """Reads that fail now and then, and note those that go where they must not."""

    def __init__(self, rng: random.Random) -> None:
        self.pager: Pager | None = None
        self.wrong: list[str] = []
        self._rng = rng

    def __call__(self, descriptor: int, view: memoryview, offset: int) -> int:
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        if self.pager is not None:
            for lease in tuple(self.pager._leases):
                start = lease.slot.buffer.address
                if start <= address < start + self.pager.ring_bytes // self.pager.n_slots:
                    self.wrong.append(f"layer {lease.index} is lent and read over")
            if self._rng.random() < 0.05:
                raise OSError(errno.EIO, "Input/output error")
        try:
            return os.preadv(descriptor, [view], offset)
        except OSError as error:
            self.wrong.append(str(error))  # EFAULT: the memory is closed
            raise


@pytest.mark.parametrize("seed", range(3))
def test_readers_write_only_into_slots_that_are_not_lent(tmp_path: Path, seed: int) -> None:
    """Under restarts, errors and nesting, no read goes to memory whose pages are elsewhere."""
    rng = random.Random(seed)
    reads = WatchedReads(rng)
    storage = partial(DirectFile, read_at=reads)
    n_errors = 0
    with (
        mapped(write_weights(tmp_path, uneven_sizes(7, seed))) as files,
        Pager(
            files.layers, [], files.mappings, 3, read_bytes=PAGE, storage=storage, poison=True
        ) as pager,
    ):
        reads.pager = pager
        for _ in range(150):
            start = rng.randrange(7)
            try:
                for index in range(start, rng.randint(start, 7)):
                    pager.enter(index)
                    pager.leave(index - 1)
                    files.check(index)
            except StorageError:
                n_errors += 1
            if rng.random() < 0.5:
                pager.restart()
            for index in range(7):
                pager.leave(index)
        check_memory(pager, files)
    assert n_errors > 0
    assert not reads.wrong


def test_a_file_cut_or_changed_while_running(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[29_000], [25_000], [42_000]])
    path = tmp_path / "shard-0.bin"
    with (
        mapped(weights) as files,
        Pager(files.layers, [], files.mappings, 2, read_bytes=PAGE) as pager,
    ):
        files.walk(pager, 2)
        os.utime(path, ns=(1, 1))
        for _ in range(2):  # it does not heal by itself
            with pytest.raises(StorageError, match="changed while in use"):
                files.walk(pager)
        assert pager.stats.passes == 2
        os.truncate(path, 33_000)
        with pytest.raises(StorageError, match="ended early|changed while in use"):
            files.walk(pager, 3)
        check_memory(pager, files)


def test_resident_tensors_that_cannot_be_read(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[50_000]] * 4, resident=lambda i, j: i > 0)
    reads = FaultyReads(lambda call, length: _raise_if(call == 2))
    with mapped(weights) as files:
        with pytest.raises(StorageError, match="Input/output error"):
            Pager(files.layers, [], files.mappings, 2, read_bytes=PAGE, storage=reads.storage)
        assert bytes_in(files.ranges.values()) == 0
        for layer in files.layers:
            assert not is_readable(files.address(layer.tensors[0]))
        assert not reader_threads()
        gc.collect()


# --- passes that are given up ----------------------------------------------------------------


@pytest.mark.parametrize("n_slots", [1, 2, 3, 5])
@pytest.mark.parametrize("stop", range(6))
def test_an_aborted_pass_begins_anew(tmp_path: Path, n_slots: int, stop: int) -> None:
    weights = write_weights(tmp_path, uneven_sizes(6, stop), resident=lambda i, j: i in (0, 3))
    with (
        mapped(weights) as files,
        Pager(files.layers, [], files.mappings, n_slots, read_bytes=PAGE, poison=True) as pager,
    ):
        for explicit in (False, True):
            files.walk(pager, 2, stop_before=stop)
            if explicit:
                pager.restart()
            files.walk(pager)
        assert pager.stats.passes == 4 if stop else 2


def test_a_restart_takes_back_what_is_lent(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, uneven_sizes(5, 3))
    with (
        mapped(weights) as files,
        Pager(files.layers, [], files.mappings, 2, poison=True) as pager,
    ):
        pager.enter(0)
        pager.enter(1)
        files.check(0)
        files.check(1)
        pager.restart()
        for index in range(5):
            files.check_absent(index)
        files.walk(pager, 2)
        pager.leave(0)
        pager.leave(1)
        files.walk(pager, 2)
        assert pager.stats.passes == 4


def test_layers_may_be_nested_as_deep_as_the_ring(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[29_000], [25_000], [12_000]])
    with (
        mapped(weights) as files,
        Pager(files.layers, [], files.mappings, 2, poison=True) as pager,
    ):
        with pager.layer(0), pager.layer(1):
            with pytest.raises(RuntimeError, match="2 slots"):
                pager.enter(2)
            with pytest.raises(RuntimeError, match="out of order"):
                pager.enter(0)
            files.check(0)
            files.check(1)
        files.walk(pager, 2)


def test_an_exception_in_the_block_counts_no_pass(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, uneven_sizes(5, 3))
    with (
        mapped(weights) as files,
        Pager(files.layers, [], files.mappings, 1, poison=True) as pager,
    ):
        for index in range(5):
            with pytest.raises(ZeroDivisionError), pager.layer(index):
                raise ZeroDivisionError
            files.check_absent(index)
        assert pager.stats.passes == 0
        files.walk(pager, 2)
        assert pager.stats.passes == 2


class Alarm(BaseException):
    pass


def assert_unlocked(error: RuntimeError) -> None:
    if "unlocked lock" not in str(error):
        raise error


def disarm() -> None:
    while True:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
            return
        except Alarm:
            continue


def test_an_interrupt_at_any_moment_loses_no_page(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, uneven_sizes(5, 3), resident=lambda i, j: j == 2)

    def ring(*_: object) -> None:
        raise Alarm

    rng = random.Random(0)
    n_rung = 0
    previous = signal.signal(signal.SIGALRM, ring)
    try:
        with (
            mapped(weights) as files,
            Pager(files.layers, [], files.mappings, 2, read_bytes=4 * PAGE, poison=True) as pager,
        ):
            for number in range(150):
                try:
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 2e-3))
                    files.walk(pager)
                except Alarm:
                    n_rung += 1
                except RuntimeError as error:
                    # A Condition whose wait is interrupted while it takes its lock again.
                    assert_unlocked(error)
                disarm()
                if number % 2:
                    pager.restart()
                    for index in range(5):
                        files.check_absent(index)
                else:
                    for index in range(5):
                        pager.leave(index)
                files.walk(pager)
                check_memory(pager, files)
    finally:
        disarm()
        signal.signal(signal.SIGALRM, previous)
    assert n_rung > 0


# --- waiting and closing -----------------------------------------------------------------------


def page_weights(folder: Path) -> Weights:
    """Whole pages only: nothing is resident, so that every read is the ring's."""
    sizes = [[4 * PAGE], [PAGE], [7 * PAGE], [2 * PAGE], [5 * PAGE]]
    return write_weights(folder, sizes, padding=PAGE)


def test_ctrl_c_interrupts_the_wait(tmp_path: Path) -> None:
    gate = Gate(2)
    with (
        mapped(page_weights(tmp_path)) as files,
        Pager(
            files.layers, [], files.mappings, 2, read_bytes=PAGE, storage=gate.storage, poison=True
        ) as pager,
    ):
        # The gate stays shut until the interrupt has come through: a deaf wait would never end.
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            files.walk(pager)
        gate.opened.set()
        files.walk(pager, 2)


def test_closing_while_the_caller_waits(tmp_path: Path) -> None:
    gate = Gate(0)
    caught: list[BaseException] = []
    with mapped(page_weights(tmp_path)) as files:
        pager = Pager(files.layers, [], files.mappings, 2, storage=gate.storage)

        def wait() -> None:
            try:
                pager.enter(0)
            except BaseException as error:
                caught.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        gate.reached.wait()
        closing = threading.Thread(target=pager.close)
        closing.start()
        waiting.join()
        assert isinstance(caught[0], StreamerClosed)
        gate.opened.set()
        closing.join()


@pytest.mark.parametrize("is_in", [False, True])
def test_closing_gives_all_memory_back_and_leaves_no_trap(tmp_path: Path, is_in: bool) -> None:
    weights = write_weights(tmp_path, uneven_sizes(5, 3), resident=lambda i, j: j == 1)
    with mapped(weights) as files:
        pager = Pager(files.layers, [], files.mappings, 2)
        slots = slot_ranges(pager)
        if is_in:
            pager.enter(0)
        pager.close()
        pager.close()
        assert not reader_threads()
        assert bytes_in([*slots, *files.ranges.values()]) == 0
        for index in range(5):
            files.check_absent(index)
        with pytest.raises(StreamerClosed):
            pager.enter(0)
        pager.leave(0)
        pager.restart()
    # The owner has unmapped the file; what is mapped there now is none of the pager's business.
    with mapped(weights) as files:
        pager.close()
        del pager
        gc.collect()
        files.check(0)


def test_a_read_that_never_returns_does_not_block_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("offload.pager._JOIN_SECONDS", 0.01)
    gate = Gate(0)
    with mapped(page_weights(tmp_path)) as files:
        pager = Pager(files.layers, [], files.mappings, 2, storage=gate.storage)
        gate.reached.wait()
        with caplog.at_level(logging.WARNING):
            pager.close()
        assert "does not return" in caplog.text
        files.check_absent(0)
    gate.opened.set()  # it returns after all, into memory that is still there
    for thread in reader_threads():
        thread.join()


def test_a_forgotten_pager_ends_its_threads_and_leaves_the_mapping(tmp_path: Path) -> None:
    with mapped(page_weights(tmp_path)) as files:
        pager = Pager(files.layers, [], files.mappings, 2)
        slots = slot_ranges(pager)
        pager.enter(0)
        del pager
        gc.collect()
        for thread in reader_threads():
            thread.join(5)
        assert not reader_threads()
        files.check(0)
        gc.collect()
        assert bytes_in(slots) == 0


def test_arguments_are_checked_before_anything_is_touched(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[50_000]])
    with mapped(weights) as files:
        for keywords in ({"n_slots": 0}, {"n_slots": 1, "n_readers": 0}):
            with pytest.raises(ValueError, match="slot and a reader"):
                Pager(files.layers, [], files.mappings, **keywords)
        with pytest.raises(ValueError, match="multiple of 4096"):
            Pager(files.layers, [], files.mappings, 1, read_bytes=1000)
        with pytest.raises(AddressSpaceError, match="mapped 0 times"):
            Pager(files.layers, [], {}, 1)
        files.check(0)
        with Pager(files.layers, [], files.mappings, 1) as pager:
            for index in (-1, 1):
                with pytest.raises(IndexError):
                    pager.enter(index)


def test_a_missing_file_leaves_nothing_open(tmp_path: Path) -> None:
    with mapped(page_weights(tmp_path)) as files:
        (tmp_path / "shard-0.bin").unlink()
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(StorageError, match="cannot open"):
            Pager(files.layers, [], files.mappings, 2)
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == before
        assert bytes_in(files.ranges.values()) == 0


def test_figures(tmp_path: Path) -> None:
    with (
        mapped(page_weights(tmp_path)) as files,
        Pager(files.layers, [], files.mappings, 1, read_bytes=PAGE) as pager,
    ):
        files.walk(pager, 2)
        before = pager.stats
        assert before.passes == 2
        assert before.bytes_read >= 2 * 19 * PAGE
        assert before.stall_seconds > 0
        assert before.read_seconds > 0
        files.walk(pager)
        span = pager.stats - before
        assert span.passes == 1
        assert span.bytes_read <= 2 * 19 * PAGE


# --- a wrong schedule crashes ------------------------------------------------------------------

CHILD = """
import ctypes, sys
from pathlib import Path
from mapped_weights import MappedWeights
from weight_files import write_weights
from offload.pager import Pager

files = MappedWeights(write_weights(Path(sys.argv[1]), [[30000], [5000000], [30000]]))
pager = Pager(files.layers, [], files.mappings, 2)
use, moment = int(sys.argv[2]), sys.argv[3]
for index in range(3):
    if moment == "before" and index == use:
        break
    with pager.layer(index):
        files.check(index)
if moment == "closed":
    pager.close()
print("alive", flush=True)
address = files.address(files.layers[use].tensors[0])
if moment == "write":
    pager.enter(use)
    ctypes.memset(address + 4096, 1, 1)
files.check(use)
print("survived")
"""


@pytest.mark.parametrize("moment", ["before", "after", "closed", "write"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_an_absent_layer_faults(tmp_path: Path, layer: int, moment: str) -> None:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), str(root / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), str(layer), moment],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("alive\n", -signal.SIGSEGV), done.stderr
