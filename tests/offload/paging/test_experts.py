"""Expert pages over a real mapped file: the requested ones are loaded, and no others."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mapped_weights import is_readable, libc, map_file, memory_in
from weight_files import FaultyReads, HangingFile

from offload.errors import SpecdecError
from offload.experts import readers as readers_file
from offload.formats.tensors import TensorRecord
from offload.paging import experts as experts_file
from offload.paging.address_space import (
    AddressSpaceError,
    Move,
    find_mapping,
    max_mappings,
    move_pages,
)
from offload.paging.expert_pages import Fetched, Region, outside, overhead_bytes, tensors_of
from offload.paging.experts import PagedExperts
from offload.placement.experts import ExpertCachePlan, LayerExperts
from offload.storage.aligned import PAGE_BYTES
from offload.storage.direct_io import StorageError
from offload.units import format_bytes

N_LAYERS, N_EXPERTS = 3, 12
SIZES = (9000, 3001, 3 * PAGE_BYTES)
"""Tensor sizes of an expert: shared pages, less than one page, or whole pages."""


class Mixture:
    """A mapped file in which every tensor has the experts of a layer one after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        rng, content, layers = np.random.default_rng(0), bytearray(b"header "), []
        for layer in range(N_LAYERS):
            parts = []
            for part, size in enumerate(SIZES):
                content += rng.bytes(-len(content) % PAGE_BYTES if part == 2 else 40)
                name, start = f"{layer}.{part}", len(content)
                content += rng.bytes(N_EXPERTS * size)
                parts.append(
                    [
                        TensorRecord(f"{name}[{e}]", "U8", (size,), path, start + e * size, size)
                        for e in range(N_EXPERTS)
                    ]
                )
            layers.append(LayerExperts(tuple(zip(*parts, strict=True)), 2, is_at_once=True))
        self.content = bytes(content) + bytes(PAGE_BYTES)
        path.write_bytes(self.content)
        self.layers = tuple(layers)
        self.address, self.size = map_file(path)
        self.mappings = {path: find_mapping(path)}
        self.own = outside(self.layers).untouched

    def plan(self, n_slots: int) -> ExpertCachePlan:
        return ExpertCachePlan(self.layers, n_slots)

    def check(self, layer: int, experts: list[int]) -> None:
        for expert in experts:
            for record in self.layers[layer].tensors[expert]:
                actual = ctypes.string_at(self.address + record.offset, record.n_bytes)
                assert actual == self.content[record.offset : record.offset + record.n_bytes]

    def n_bytes_there(self) -> int:
        """Return the memory of the experts' own pages."""
        return memory_in([(self.address, self.size)])

    def is_there(self, layer: int, expert: int) -> bool:
        """Return whether the inner page of its last tensor is loaded."""
        record = self.layers[layer].tensors[expert][2]
        return is_readable(self.address + record.offset + PAGE_BYTES)


def there(mixture: Mixture) -> list[tuple[int, int]]:
    """Return (layer, expert) of the usable experts."""
    return [(i, e) for i in range(N_LAYERS) for e in range(N_EXPERTS) if mixture.is_there(i, e)]


@pytest.fixture
def mixture(tmp_path: Path) -> Iterator[Mixture]:
    made = Mixture(tmp_path / "experts.bin")
    yield made
    libc.munmap(made.address, made.size)


@pytest.fixture
def paged(mixture: Mixture) -> Iterator[PagedExperts]:
    made = PagedExperts(mixture.plan(14), mixture.mappings)
    yield made
    made.close()


@pytest.mark.slow
def test_the_bytes_are_the_files_own_and_take_no_more_memory_than_planned(mixture, paged) -> None:
    rng, limit = np.random.default_rng(1), mixture.plan(14).n_bytes
    for step in range(30):
        experts = rng.choice(N_EXPERTS, int(rng.integers(1, N_EXPERTS + 1)), replace=False).tolist()
        paged.fetch(step % N_LAYERS, experts)
        for layer, expert in there(mixture):
            mixture.check(layer, [expert])
        assert {(step % N_LAYERS, expert) for expert in experts} <= set(there(mixture))
        assert mixture.n_bytes_there() == limit - paged.unread_bytes <= limit
    assert 0 < paged.stats.n_hits < paged.stats.n_asked
    assert paged.stats.n_asked_full > 0


@pytest.mark.parametrize("n_slots", [12, 14, 24])
def test_prefetched_experts_are_there_beside_those_in_use(mixture, n_slots: int) -> None:
    """Any order of prefetches and accesses, as passes that are cancelled cause."""
    paged = PagedExperts(mixture.plan(n_slots), mixture.mappings)
    rng, limit = np.random.default_rng(n_slots), mixture.plan(n_slots).n_bytes
    try:
        for _ in range(40):
            layer = int(rng.integers(N_LAYERS))
            experts = rng.choice(N_EXPERTS, int(rng.integers(1, N_EXPERTS + 1)), replace=False)
            paged.fetch(layer, experts.tolist())
            if rng.random() < 0.7:
                paged.prefetch((layer + 1) % N_LAYERS, {layer: experts.tolist()})
            mixture.check(layer, experts.tolist())
            assert mixture.n_bytes_there() <= limit
    finally:
        paged.close()


def test_a_prefetch_is_read_once_and_counts_as_missed(mixture, paged) -> None:
    paged.fetch(0, [3])
    paged.prefetch(1, {0: [3]})
    paged.fetch(1, range(N_EXPERTS))
    mixture.check(1, list(range(N_EXPERTS)))
    assert there(mixture) == [(0, 3), *((1, e) for e in range(N_EXPERTS))]
    assert paged.stats.bytes_read == mixture.n_bytes_there()
    assert (paged.stats.n_asked, paged.stats.n_hits) == (1 + N_EXPERTS, 0)


def test_a_prefetch_takes_what_memory_is_left(mixture, paged) -> None:
    paged.fetch(0, range(10))
    paged.prefetch(1, {0: range(10)})
    paged.fetch(2, [0])  # waits for it
    assert {layer for layer, _ in there(mixture)} >= {1, 2}
    assert [e for layer, e in there(mixture) if layer == 1] == [0, 1, 2, 3]


def test_an_error_of_a_prefetch_is_the_next_access_s(mixture) -> None:
    is_broken = False

    def fault(call: int, length: int) -> None:
        if is_broken:
            raise OSError(5, "Input/output error")

    paged = PagedExperts(mixture.plan(14), mixture.mappings, storage=FaultyReads(fault).storage)
    try:
        paged.fetch(0, [1, 4])
        before, is_broken = mixture.n_bytes_there(), True
        paged.prefetch(1, {0: [1, 4]})
        with pytest.raises(StorageError, match="Input/output error"):
            paged.fetch(1, [2])
        is_broken = False
        assert mixture.n_bytes_there() == before
        paged.fetch(1, [2])
        mixture.check(1, [2])
        mixture.check(0, [1, 4])
    finally:
        paged.close()


def test_a_prefetch_that_hangs_is_waited_for_and_given_up(mixture, hanging) -> None:
    def end() -> None:
        raise KeyboardInterrupt

    hanging.prefetch(0, {})
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            hanging.fetch(0, [1], end)
    HangingFile.let_go.set()
    hanging.fetch(1, [5])
    assert there(mixture) == [(1, 5)]


def test_what_was_not_asked_for_is_not_there(mixture, paged) -> None:
    paged.fetch(1, [2, 3, 7])
    assert there(mixture) == [(1, 2), (1, 3), (1, 7)]
    before = paged.stats.bytes_read
    paged.fetch(1, [7, 2])
    assert paged.stats.bytes_read == before


def test_a_read_that_fails_leaves_nothing_behind(mixture) -> None:
    is_broken = False

    def fault(call: int, length: int) -> None:
        if is_broken and call % 3 == 0:
            raise OSError(5, "Input/output error")

    paged = PagedExperts(mixture.plan(14), mixture.mappings, storage=FaultyReads(fault).storage)
    try:
        paged.fetch(0, [1, 4])
        before, is_broken = mixture.n_bytes_there(), True
        with pytest.raises(StorageError, match="Input/output error"):
            paged.fetch(0, [0, 1, 2, 5, 8, 11])
        is_broken = False
        assert mixture.n_bytes_there() == before
        assert not mixture.is_there(0, 2)
        mixture.check(0, [1, 4])
        paged.fetch(0, [0, 1, 2, 5])
        mixture.check(0, [0, 1, 2, 5])
    finally:
        paged.close()


@pytest.fixture
def hanging(mixture: Mixture) -> Iterator[PagedExperts]:
    HangingFile.let_go.clear()
    made = PagedExperts(mixture.plan(14), mixture.mappings, storage=HangingFile)
    yield made
    HangingFile.let_go.set()
    made.close()


def test_an_access_ends_while_its_reads_hang(mixture, hanging) -> None:
    """The next access waits for the reads and their pages, and ends as well."""

    def end() -> None:
        raise KeyboardInterrupt

    for layer in (0, 0, 1):
        with pytest.raises(KeyboardInterrupt):
            hanging.fetch(layer, [1, 2], end)
    HangingFile.let_go.set()
    hanging.fetch(2, [5])
    mixture.check(2, [5])
    assert there(mixture) == [(2, 5)]
    assert mixture.n_bytes_there() == mixture.plan(14).n_bytes - hanging.unread_bytes


def test_reads_that_were_given_up_count(mixture, hanging) -> None:
    def end() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hanging.fetch(0, [1, 2], end)
    HangingFile.let_go.set()
    hanging.fetch(0, [1, 2])
    assert hanging.stats.bytes_read == 2 * mixture.n_bytes_there()


def test_closing_while_reads_start_ends_an_access_in_one_line(
    mixture, paged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread closes the model at that moment."""
    move = experts_file._move

    def closing(*args: list[Fetched]) -> None:
        move(*args)
        paged.close()

    monkeypatch.setattr(experts_file, "_move", closing)
    with pytest.raises(SpecdecError, match="the model was closed"):
        paged.fetch(0, [1, 2])


def test_a_read_that_never_returns_does_not_block_closing(
    hanging, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def end() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hanging.fetch(0, [1], end)
    monkeypatch.setattr(readers_file, "JOIN_SECONDS", 0.01)
    hanging.close()
    assert "does not return; its memory is not freed" in caplog.text


def test_a_file_that_was_changed_is_noticed(mixture, paged) -> None:
    paged.fetch(0, [1])
    mixture.path.write_bytes(bytes(len(mixture.content)))
    with pytest.raises(StorageError, match="was changed while in use"):
        paged.fetch(0, [2])
    assert not mixture.is_there(0, 2)


def test_too_little_memory_for_a_layer_is_said(mixture) -> None:
    """The message also has the sufficient amount of memory."""
    little, enough = mixture.plan(2), mixture.plan(N_EXPERTS)
    paged = PagedExperts(little, mixture.mappings)
    lacking = format_bytes(enough.n_bytes - little.n_bytes)
    try:
        with pytest.raises(SpecdecError, match=rf"needs 12 experts at once.*budget by {lacking}$"):
            paged.fetch(0, range(N_EXPERTS))
    finally:
        paged.close()
    paged = PagedExperts(enough, mixture.mappings)
    paged.fetch(0, range(N_EXPERTS))
    paged.close()


def test_files_are_closed_where_pages_cannot_be_prepared(
    mixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise AddressSpaceError("mmap failed", errno.ENOMEM)

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(experts_file, "reserve", refuse)
    with pytest.raises(AddressSpaceError) as raised:
        PagedExperts(mixture.plan(14), mixture.mappings)
    assert raised.value.errno == errno.ENOMEM
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("call", ["prepare", "move_pages", "reserve"])
def test_too_many_mappings_are_a_lack_of_memory(
    mixture, paged, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The limit may be hit while pages are made usable, moved or freed."""

    def refuse(*_: object, **__: object) -> None:
        raise AddressSpaceError("mprotect failed", errno.ENOMEM)

    paged.fetch(0, range(N_EXPERTS))
    monkeypatch.setattr(experts_file, call, refuse)
    with pytest.raises(MemoryError, match="vm.max_map_count"):
        paged.fetch(1, range(N_EXPERTS))
    if call == "reserve":  # nothing is allocated that could not be freed
        with pytest.raises(MemoryError, match="vm.max_map_count"):
            paged.fetch(0, range(N_EXPERTS))
    monkeypatch.undo()
    for layer in (2, 1, 0):
        paged.fetch(layer, range(N_EXPERTS))
        mixture.check(layer, list(range(N_EXPERTS)))
        assert mixture.n_bytes_there() == mixture.plan(14).n_bytes - paged.unread_bytes


def test_of_many_mappings_no_more_are_made_by_moving(
    mixture, paged, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[Move] = []
    monkeypatch.setattr(experts_file, "move_pages", lambda moves, _: move_pages(moves, moved))
    monkeypatch.setattr(experts_file, "n_mappings", lambda: max_mappings() // 2)
    for layer in range(N_LAYERS):
        paged.fetch(layer, range(N_EXPERTS))
        mixture.check(layer, list(range(N_EXPERTS)))
    assert moved == []
    assert mixture.n_bytes_there() == mixture.plan(14).n_bytes - paged.unread_bytes


def test_pages_of_experts_that_go_become_those_of_experts_that_come(
    mixture, paged, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[Move] = []
    monkeypatch.setattr(experts_file, "move_pages", lambda moves, _: move_pages(moves, moved))
    rng = np.random.default_rng(2)
    paged.fetch(0, range(N_EXPERTS))
    for step in range(40):
        paged.fetch(step % N_LAYERS, rng.choice(N_EXPERTS, 4, replace=False).tolist())
    n_read = paged.stats.bytes_read
    assert 0.5 * n_read < sum(move.n_bytes for move in moved) < n_read


def test_after_the_end_nothing_is_there(mixture, paged) -> None:
    paged.fetch(0, [1, 2])
    paged.close()
    paged.close()
    assert mixture.n_bytes_there() == 0
    with pytest.raises(SpecdecError, match="closed"):
        paged.fetch(0, [1])


def test_the_edges_and_what_lies_between_are_the_whole(mixture) -> None:
    actual = outside(mixture.layers)
    n_bytes = sum(r.n_bytes for r in (*actual.resident, *actual.untouched))
    assert n_bytes == sum(layer.n_bytes for layer in mixture.layers)
    for record in actual.untouched:
        assert record.offset % PAGE_BYTES == record.n_bytes % PAGE_BYTES == 0
    item = replace(mixture.layers[0].tensors[0][1], n_bytes=100)
    tiny = outside([LayerExperts(((item,),), 1)])
    assert (sum(r.n_bytes for r in tiny.resident), tiny.untouched) == (100, ())


def test_tables_of_pages_are_counted(mixture) -> None:
    """Our own tables, and the kernel's: 8 bytes a page on x86-64 and arm64."""
    spans = [(span, first) for layer in mixture.layers for span, first in tensors_of(layer)]
    regions = [Region(span, first.n_bytes, 0) for span, first in spans]
    tables = sum(r.n_users.nbytes + r.is_border[1:].nbytes + 8 * len(r.n_users) for r in regions)
    assert overhead_bytes(mixture.layers) - tables == 4 * PAGE_BYTES * len(spans)
    assert tables > 0
