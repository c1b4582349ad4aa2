"""Equality of two tensors is read from the files, chunk by chunk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from offload.formats import comparing
from offload.formats.checkpoint import WeightIndex
from offload.formats.comparing import have_same_bytes
from offload.formats.tensors import CheckpointError, TensorRecord


@pytest.fixture
def tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, TensorRecord]:
    monkeypatch.setattr(comparing, "_PIECE_BYTES", 16)
    values = np.arange(15, dtype=np.float32).reshape(3, 5)
    last = values.copy()
    last[-1, -1] += 1
    named = {"a": values, "same": values.copy(), "last": last, "other": values.reshape(5, 3)}
    named |= {"half": values.astype(np.float16), "empty": values[:0], "none": values[:0].copy()}
    save_file(named, tmp_path / "model.safetensors")
    return dict(WeightIndex.from_directory(tmp_path))


def test_form_and_every_byte_count(tensors: dict[str, TensorRecord]) -> None:
    actual = {name: have_same_bytes(tensors["a"], record) for name, record in tensors.items()}
    assert {name for name, is_same in actual.items() if is_same} == {"a", "same"}
    assert have_same_bytes(tensors["empty"], tensors["none"])
    assert not have_same_bytes(tensors["a"], replace(tensors["same"], scheme="BF16_12"))


def test_a_file_that_ends_early_or_is_gone(tensors: dict[str, TensorRecord]) -> None:
    path = tensors["a"].path
    path.write_bytes(path.read_bytes()[: tensors["a"].offset + 20])
    with pytest.raises(CheckpointError, match="model.safetensors ended inside of"):
        have_same_bytes(tensors["a"], replace(tensors["a"], name="copy"))
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot read .*: No such file"):
        have_same_bytes(tensors["a"], tensors["same"])
