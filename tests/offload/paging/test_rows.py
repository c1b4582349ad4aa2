"""Rows read to a tensor's old mapping, from files that are truncated meanwhile."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from offload.formats.tensors import TensorRecord
from offload.paging.address_space import find_mapping, view
from offload.paging.plan import ResidentRange
from offload.paging.rows import RowsInPlace
from offload.process.memory import process_memory
from offload.storage.aligned import PAGE_BYTES
from offload.storage.direct_io import StorageError
from offload.units import MIB

NUM_ROWS, ROW_BYTES, OFFSET = 64, 3000, 1000
CONTENT = np.random.default_rng(0).bytes(OFFSET + NUM_ROWS * ROW_BYTES + 500)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def address(path: Path) -> int:
    """Address of the file's first byte, mapped for the life of the process: Python must not
    use it any more."""
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    mappings.append(pages)
    return find_mapping(path)[0].address


mappings: list[mmap.mmap] = []


def rows_of(path: Path, address: int, beside: tuple[ResidentRange, ...] = ()) -> RowsInPlace:
    record = TensorRecord("rows", "U8", (NUM_ROWS, ROW_BYTES), path, OFFSET, NUM_ROWS * ROW_BYTES)
    return RowsInPlace(record, address + OFFSET, beside)


def row_in_memory(address: int, row: int) -> bytes:
    return bytes(view(address + OFFSET + row * ROW_BYTES, ROW_BYTES))


def row_in_file(row: int) -> bytes:
    return CONTENT[OFFSET + row * ROW_BYTES :][:ROW_BYTES]


@pytest.mark.parametrize("asked", [[0], [NUM_ROWS - 1], [5, 5, 4], range(NUM_ROWS)])
def test_rows_are_those_of_the_file(path: Path, address: int, asked: list[int]) -> None:
    rows = rows_of(path, address)
    rows.read([7])
    rows.read(asked)
    assert all(row_in_memory(address, row) == row_in_file(row) for row in asked)
    rows.close()


def test_pages_that_are_in_memory_are_left_alone(path: Path, address: int) -> None:
    """The tensor's first and last page hold other data as well."""
    last = (OFFSET + NUM_ROWS * ROW_BYTES) // PAGE_BYTES * PAGE_BYTES
    beside = tuple(
        ResidentRange(path, at, PAGE_BYTES, address + at, PAGE_BYTES) for at in (0, last)
    )
    rows = rows_of(path, address, beside)
    rows.read([0, NUM_ROWS - 1])
    assert bytes(view(address, OFFSET)) == CONTENT[:OFFSET]
    assert bytes(view(address + len(CONTENT) - 500, 500)) == CONTENT[-500:]
    assert (row_in_memory(address, 0), row_in_memory(address, NUM_ROWS - 1)) == (
        row_in_file(0),
        row_in_file(NUM_ROWS - 1),
    )
    rows.close()


def test_rows_of_the_pass_before_take_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(bytes(32 * MIB))
    with path.open("rb") as file:
        mappings.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    record = TensorRecord("rows", "U8", (32 * 256, 4096), path, 0, 32 * MIB)
    rows = RowsInPlace(record, find_mapping(path)[0].address, ())
    before = process_memory().anonymous_bytes
    for start in range(0, 32 * 256, 256):
        rows.read(range(start, start + 256))
    assert process_memory().anonymous_bytes - before < 8 * MIB
    rows.close()


@pytest.mark.parametrize("n_bytes", [0, OFFSET, OFFSET + 10 * ROW_BYTES + 1, len(CONTENT) - 1])
@pytest.mark.parametrize("step", range(4))
def test_a_file_that_is_cut_at_any_step(
    path: Path, address: int, monkeypatch: pytest.MonkeyPatch, n_bytes: int, step: int
) -> None:
    """Truncate before each of three reads, and after the last one."""
    rows, read, n_reads = rows_of(path, address), os.preadv, 0

    def cut_and_read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal n_reads
        if n_reads == step:
            os.truncate(path, n_bytes)
        n_reads += 1
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", cut_and_read)
    if step < 3:
        with pytest.raises(StorageError, match="was changed while in use"):
            rows.read([0, 10, 20])
    else:
        rows.read([0, 10, 20])
        os.truncate(path, n_bytes)
    for row in (0, 10, 20):
        row_in_memory(address, row)  # unread bytes are zeros, without a signal
    with pytest.raises(StorageError, match="was changed while in use"):
        rows.read([0])
    rows.close()
