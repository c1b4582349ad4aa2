"""Tensors in unnamed files: read as they were written, and inaccessible by name."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from offload.formats.mapped import TensorShape
from offload.formats.unnamed import UnnamedFile
from offload.storage.aligned import page_up

TENSORS = (
    TensorShape("odd", "U8", (4097,)),
    TensorShape("empty", "U8", (0,)),
    TensorShape("wide", "F32", (2, 3)),
)


def fill(buffers: Mapping[str, memoryview]) -> None:
    for tensor in TENSORS:
        buffers[tensor.name][:] = tensor.name[:1].encode() * tensor.n_bytes


def test_what_was_written_is_read_and_has_no_name(tmp_path: Path) -> None:
    file = UnnamedFile(tmp_path, TENSORS, fill)
    assert not list(tmp_path.iterdir()), "a kill would leave it behind"
    assert set(file.saved) == {tensor.name for tensor in TENSORS}
    for tensor in TENSORS:
        reported, buffer = file.saved[tensor.name]
        assert reported == tensor
        assert bytes(buffer) == tensor.name[:1].encode() * tensor.n_bytes
    assert np.frombuffer(file.saved["wide"][1], np.uint8).ctypes.data % 4096 == 0
    assert file.n_bytes == sum(page_up(item.n_bytes) for item in TENSORS)
    file.close()
    file.close()


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    def failing(buffers: Mapping[str, memoryview]) -> None:
        fill(buffers)
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        UnnamedFile(tmp_path, TENSORS, failing)
    with pytest.raises(FileNotFoundError):
        UnnamedFile(tmp_path / "none", TENSORS, fill)
    assert not list(tmp_path.iterdir())


def test_no_space_is_an_error_at_once(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # for this whole process
    try:
        with pytest.raises(OSError, match="File too large"):
            UnnamedFile(tmp_path, TENSORS, fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
