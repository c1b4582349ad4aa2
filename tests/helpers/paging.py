"""Shared helpers of the pager tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from mapped_weights import MappedWeights
from mapped_weights import memory_in as bytes_in
from weight_files import Weights, write_weights

from offload.formats.tensors import TensorRecord
from offload.paging import plan as paging_plan
from offload.paging.pager import Pager
from offload.storage.aligned import PAGE_BYTES as PAGE


@pytest.fixture
def small_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small huge pages, so that tensors of a few pages have heads, bodies and tails."""
    monkeypatch.setattr(paging_plan, "HUGE_PAGE_BYTES", 4 * PAGE)


def slot_ranges(pager: Pager) -> list[tuple[int, int]]:
    ring = pager._cursor._ring
    return [(s.buffer.address, len(s.buffer.view)) for s in ring.slots] if ring else []


def check_memory(pager: Pager, files: MappedWeights) -> None:
    """Assert that exactly the planned anonymous memory exists, wherever its pages are."""
    actual = bytes_in([*slot_ranges(pager), *files.ranges.values()])
    assert actual == pager.resident_bytes + pager.ring_bytes


def one_file(path: Path, sizes: list[int], padding: int = 0) -> tuple[list[TensorRecord], bytes]:
    """Write tensors one after the other into one file."""
    content = os.urandom(padding + sum(sizes))
    path.write_bytes(content)
    offsets = [padding + sum(sizes[:number]) for number in range(len(sizes))]
    return [
        TensorRecord(f"t{number}", "U8", (size,), path, offset, size)
        for number, (size, offset) in enumerate(zip(sizes, offsets, strict=True))
    ], content


def small_weights(folder: Path) -> Weights:
    return write_weights(folder, [[29_000, 100], [25_000], [42_000], [300], [8200, 30_000]],
                         n_files=2)  # fmt: skip


def page_weights(folder: Path) -> Weights:
    """Return weights of whole pages: nothing is resident, so that every read is the ring's."""
    sizes = [[4 * PAGE], [PAGE], [7 * PAGE], [2 * PAGE], [5 * PAGE]]
    return write_weights(folder, sizes, padding=PAGE)
