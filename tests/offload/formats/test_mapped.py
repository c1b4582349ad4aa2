"""Tensors written and read in place: whole files or none, and only the written bytes."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from offload.formats import mapped
from offload.formats.mapped import TensorShape, read_mapped, write_mapped
from offload.formats.tensors import CheckpointError

TENSORS = (
    TensorShape("odd", "U8", (7,)),
    TensorShape("wide", "F32", (2, 3)),
    TensorShape("empty", "U8", (0,)),
    TensorShape("half", "F16", (5,)),
)
METADATA = {"format": "test", "note": "ä"}


def fill(buffers: Mapping[str, memoryview]) -> None:
    for i, (name, buffer) in enumerate(sorted(buffers.items())):
        buffer[:] = bytes(i + len(name) for _ in range(len(buffer)))


def contents() -> dict[str, bytes]:
    buffers = {t.name: bytearray(t.n_bytes) for t in TENSORS}
    fill({name: memoryview(buffer) for name, buffer in buffers.items()})
    return {name: bytes(buffer) for name, buffer in buffers.items()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "some.safetensors"
    write_mapped(file, TENSORS, METADATA, fill)
    return file


def test_what_was_written_is_read(path: Path) -> None:
    file = read_mapped(path)
    assert {name: bytes(buffer) for name, buffer in file.buffers.items()} == contents()
    assert {name: file.metadata[name] for name in METADATA} == METADATA
    for tensor in TENSORS:
        record = file.records[tensor.name]
        assert (record.dtype, record.shape) == (tensor.dtype, tensor.shape)
    address = np.frombuffer(file.buffers["wide"], np.uint8).ctypes.data
    assert address % 4 == 0


def test_safetensors_reads_it(path: Path) -> None:
    with safe_open(path, framework="numpy") as file:
        assert file.metadata()["note"] == "ä"
        assert file.get_tensor("half").tobytes() == contents()["half"]
        assert file.get_tensor("wide").shape == (2, 3)


def test_changes_stay_in_the_process(path: Path) -> None:
    before = path.read_bytes()
    file = read_mapped(path)
    file.buffers["odd"][:] = b"changed"
    assert path.read_bytes() == before


def test_it_is_private_and_alone(path: Path) -> None:
    assert path.stat().st_mode & 0o077 == 0  # it has somebody's data
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_link_stays_a_link(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path.name)
    write_mapped(link, TENSORS[:1], {}, fill)
    assert link.is_symlink()
    assert set(read_mapped(path).buffers) == {"odd"}


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
    write_mapped(path, TENSORS, {}, fill)
    raw = bytearray(path.read_bytes())
    (n_header,) = struct.unpack("<Q", raw[:8])
    at = data.draw(st.integers(8 + n_header, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="damaged"):
        read_mapped(path)


@pytest.mark.parametrize("n_bytes", [0, 5, 8, 100, -1])
def test_a_shorter_file_is_refused(path: Path, n_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:n_bytes])
    with pytest.raises(CheckpointError):
        read_mapped(path)


@pytest.mark.parametrize("n_bytes", [0, 100, -1])
def test_a_file_that_is_cut_after_it_was_read(path: Path, n_bytes: int) -> None:
    """The file's pages are gone: touching them would end the process."""
    file = read_mapped(path)
    file.check_unchanged()
    os.truncate(path, n_bytes % path.stat().st_size)
    with pytest.raises(CheckpointError, match="was changed since it was read"):
        file.check_unchanged()


CUT = "import os, sys; os.truncate(sys.argv[1], int(sys.argv[2]))"


@pytest.mark.parametrize("n_bytes", [0, 100])
def test_who_cuts_a_file_waits_while_its_tensors_are_used(path: Path, n_bytes: int) -> None:
    """Every step of reading is covered: before, between, and behind the last one."""
    file = read_mapped(path)
    with ExitStack() as running:
        with file.unchanged():
            command = [sys.executable, "-c", CUT, str(path), str(n_bytes)]
            cutting = running.enter_context(subprocess.Popen(command))
            for name, buffer in file.buffers.items():
                with pytest.raises(subprocess.TimeoutExpired):
                    cutting.wait(timeout=0.3)
                assert bytes(buffer) == contents()[name]
        assert cutting.wait(timeout=60) == 0
    assert path.stat().st_size == n_bytes
    with pytest.raises(CheckpointError, match="was changed since it was read"), file.unchanged():
        raise AssertionError


def test_a_file_that_somebody_writes_is_refused(path: Path) -> None:
    file = read_mapped(path)
    with (
        path.open("r+b"),
        pytest.raises(CheckpointError, match="opened it for writing"),
        file.unchanged(),
    ):
        raise AssertionError
    with file.unchanged():
        assert bytes(file.buffers["odd"]) == contents()["odd"]


def test_a_file_that_is_cut_while_it_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(file: BinaryIO, start: int) -> str:
        os.truncate(path, 0)
        return digest(file, start)

    digest = mapped._digest
    monkeypatch.setattr(mapped, "_digest", cut)
    with pytest.raises(CheckpointError):
        read_mapped(path)


def test_another_safetensors_file_is_refused(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    path = tmp_path / "weights.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"x")
    with pytest.raises(CheckpointError, match="another program"):
        read_mapped(path)


def test_a_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_mapped(tmp_path / "fifo")
