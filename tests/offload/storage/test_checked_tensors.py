"""Tensors written in place and read ahead: whole files or none, and only the written bytes."""

from __future__ import annotations

import errno
import gc
import json
import os
import struct
import weakref
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from offload.formats.mapped import (
    PIECE_BYTES,
    LazyMapping,
    TensorShape,
    file_bytes,
    pieces_of,
    write_mapped,
)
from offload.formats.tensors import CheckpointError
from offload.storage import checked_tensors
from offload.storage.checked_tensors import CheckedTensors

TENSORS = (
    TensorShape("odd", "U8", (7,)),
    TensorShape("wide", "F32", (2, 3)),
    TensorShape("empty", "U8", (0,)),
    TensorShape("half", "F16", (5,)),
)
LARGE = tuple(
    TensorShape(f"t{i}", "U8", (n,)) for i, n in enumerate((PIECE_BYTES + 9, 5, 3 * PIECE_BYTES))
)
METADATA = {"format": "test", "note": "ä"}


def fill(buffers: Mapping[str, memoryview]) -> None:
    for i, (name, buffer) in enumerate(sorted(buffers.items())):
        buffer[:] = np.random.default_rng(i + len(name)).bytes(len(buffer))


def contents(tensors: tuple[TensorShape, ...] = TENSORS) -> dict[str, bytes]:
    buffers = {t.name: bytearray(t.n_bytes) for t in tensors}
    fill({name: memoryview(buffer) for name, buffer in buffers.items()})
    return {name: bytes(buffer) for name, buffer in buffers.items()}


def read(path: Path, num_ahead: int = 0) -> dict[str, bytes]:
    with closing(CheckedTensors(path)) as file:
        file.num_ahead = num_ahead
        return {name: bytes(content) for name, (_, content) in file.items()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "some.safetensors"
    write_mapped(file, TENSORS, METADATA, fill)
    return file


@pytest.fixture
def large(tmp_path: Path) -> Path:
    file = tmp_path / "large.safetensors"
    write_mapped(file, LARGE, METADATA, fill)
    return file


def test_what_was_written_is_read(path: Path) -> None:
    assert path.stat().st_size == file_bytes(TENSORS, METADATA)
    with closing(CheckedTensors(path)) as file:
        assert {name: bytes(content) for name, (_, content) in file.items()} == contents()
        assert {name: file.metadata[name] for name in METADATA} == METADATA
        for tensor in TENSORS:
            assert file[tensor.name][0] == tensor
        assert np.frombuffer(file["wide"][1], np.uint8).ctypes.data % 4 == 0


@pytest.mark.parametrize("num_ahead", [0, 1, 2, 9])
def test_tensors_of_several_pieces(large: Path, num_ahead: int) -> None:
    assert read(large, num_ahead) == contents(LARGE)
    assert large.stat().st_size == file_bytes(LARGE, METADATA)


@given(st.integers(0, 3 * PIECE_BYTES), st.integers(0, 4 * PIECE_BYTES))
def test_pieces_cover_a_tensor(offset: int, n_bytes: int) -> None:
    pieces = pieces_of(offset, n_bytes)
    assert sum(end - first for first, end in pieces) == n_bytes
    assert all(0 < end - first <= PIECE_BYTES for first, end in pieces)
    assert all(first % PIECE_BYTES == 0 for first, _ in pieces[1:])
    if pieces:
        assert (pieces[0][0], pieces[-1][1]) == (offset, offset + n_bytes)


@settings(max_examples=30, deadline=None)
@given(
    order=st.lists(st.sampled_from([t.name for t in LARGE]), max_size=6), ahead=st.integers(0, 2)
)
def test_any_order_of_accesses(
    tmp_path_factory: pytest.TempPathFactory, order: list[str], ahead: int
) -> None:
    path = tmp_path_factory.mktemp("order") / "file"
    write_mapped(path, LARGE, {}, fill)
    with closing(CheckedTensors(path)) as file:
        file.num_ahead = ahead
        contents_by_name = contents(LARGE)
        # All are held at once: none may be overwritten by a later read.
        accessed = [(name, file[name][1]) for name in order]
        assert all(content == contents_by_name[name] for name, content in accessed)


def test_safetensors_reads_it(path: Path) -> None:
    with safe_open(path, framework="numpy") as file:
        assert file.metadata()["note"] == "ä"
        assert file.get_tensor("half").tobytes() == contents()["half"]
        assert file.get_tensor("wide").shape == (2, 3)


def test_changes_stay_in_the_process(path: Path) -> None:
    before = path.read_bytes()
    with closing(CheckedTensors(path)) as file:
        file["odd"][1][:] = b"changed"
    assert path.read_bytes() == before


def test_memory_is_used_again(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[checked_tensors.AlignedBuffer]] = []
    make = checked_tensors.AlignedBuffer

    def count(*args: int, **more: bool) -> checked_tensors.AlignedBuffer:
        buffer = make(*args, **more)
        made.append(weakref.ref(buffer))
        return buffer

    monkeypatch.setattr(checked_tensors, "AlignedBuffer", count)
    with closing(CheckedTensors(large)) as file:
        for _ in range(5):
            assert len(file["t2"][1]) == 3 * PIECE_BYTES
        assert len(made) == 1
        content = file["t0"][1]
    del file
    gc.collect()
    assert bytes(content) == contents(LARGE)["t0"]  # a view outlives the file
    assert made[0]() is not None
    del content
    gc.collect()
    assert made[0]() is None


def test_memory_is_bounded(large: Path) -> None:
    with closing(CheckedTensors(large)) as file:
        assert PIECE_BYTES * 3 < file.staged_bytes(0) < PIECE_BYTES * 3 + 5 * 4096
        assert PIECE_BYTES * 4 < file.staged_bytes(1) < PIECE_BYTES * 4 + 7 * 4096


def test_it_is_private_and_alone(path: Path) -> None:
    assert path.stat().st_mode & 0o077 == 0  # it has somebody's data
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_link_stays_a_link(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path.name)
    write_mapped(link, TENSORS[:1], {}, fill)
    assert link.is_symlink()
    assert set(read(path)) == {"odd"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError("no")])
def test_a_failure_leaves_the_old_file(path: Path, error: BaseException) -> None:
    before = path.read_bytes()

    def fail(buffers: Mapping[str, memoryview]) -> None:
        fill(buffers)
        raise error

    with pytest.raises((KeyboardInterrupt, ValueError)):
        write_mapped(path, TENSORS, {}, fail)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_full_disk_is_an_error_and_no_signal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        write_mapped(path, TENSORS, {}, fill)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_changed_byte_goes_unnoticed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("mapped") / "file"
    tensors = data.draw(st.sampled_from([TENSORS, LARGE]))
    write_mapped(path, tensors, {}, fill)
    raw = bytearray(path.read_bytes())
    (n_header,) = struct.unpack("<Q", raw[:8])
    at = data.draw(st.integers(8 + n_header, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="damaged"):
        read(path)


@pytest.mark.parametrize("n_bytes", [0, 5, 8, 100, -1])
def test_a_shorter_file_is_refused(path: Path, n_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:n_bytes])
    with pytest.raises(CheckpointError):
        CheckedTensors(path)


@pytest.mark.parametrize("n_bytes", [0, 100, PIECE_BYTES, -1])
def test_a_file_that_is_cut_while_it_is_read(large: Path, n_bytes: int) -> None:
    with closing(CheckedTensors(large)) as file:
        assert bytes(file["t0"][1]) == contents(LARGE)["t0"]
        os.truncate(large, n_bytes % large.stat().st_size)
        with pytest.raises(CheckpointError, match="large.safetensors"):
            file["t2"]


def test_a_replaced_file_is_read_to_its_end(large: Path) -> None:
    with closing(CheckedTensors(large)) as file:
        write_mapped(large, TENSORS, {}, fill)
        assert {name: bytes(content) for name, (_, content) in file.items()} == contents(LARGE)


def header_of(metadata: dict[str, str], n_bytes: int = 1) -> bytes:
    entry = {"dtype": "U8", "shape": [n_bytes], "data_offsets": [0, n_bytes]}
    header = json.dumps({"__metadata__": metadata, "a": entry}).encode()
    return struct.pack("<Q", len(header)) + header


@pytest.mark.parametrize("digits", [None, "", "0000", "0000000g", "-0000001", "0x000001"])
def test_another_safetensors_file_is_refused(tmp_path: Path, digits: str | None) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(header_of({} if digits is None else {"crc32": digits}) + b"x")
    with pytest.raises(CheckpointError, match="another program"):
        CheckedTensors(path)


def test_a_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(CheckpointError, match="not a regular file"):
        CheckedTensors(tmp_path / "fifo")


def test_values_of_a_lazy_mapping_are_made_at_each_access() -> None:
    mapping = LazyMapping({"a": 0}, lambda name: [name])
    assert mapping["a"] == ["a"]
    assert mapping["a"] is not mapping["a"]
    with pytest.raises(KeyError):
        mapping["b"]
