"""Files that change between header reading and the end of loading give no model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from open_files import n_open_files
from tiny_pair import save_model

from backends.contract.source import BackendOptions, Loading, ModelSource
from backends.hf.source import HfSource
from offload.formats.tensors import CheckpointError
from offload.placement.placement import Placement


def hf(folder: Path) -> ModelSource:
    return HfSource(save_model(folder / "model", seed=1), BackendOptions())


def gguf(folder: Path) -> ModelSource:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    from gguf_models import save_tiny_gguf

    from backends.llama.source import GgufSource

    return GgufSource(save_tiny_gguf("llama", folder / "m.gguf"), BackendOptions(n_threads=1))


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(bytes(8))
    os.utime(path, ns=(1, 1))  # a clock tick later, whatever the clock's resolution


def replace(path: Path) -> None:
    copy = shutil.copy2(path, path.with_name("copy"))
    os.replace(copy, path)


@pytest.mark.parametrize("change", [overwrite, replace])
@pytest.mark.parametrize("make", [hf, pytest.param(gguf, marks=pytest.mark.gguf)])
def test_a_changed_file_is_refused(
    make: Callable[[Path], ModelSource], change: Callable[[Path], None], tmp_path: Path
) -> None:
    source = make(tmp_path)
    loading = Loading(Placement(source.layers, 2), 16, 4, 4)
    source.load(loading).close()
    n_files = n_open_files()
    change(source.weight_file)
    with pytest.raises(CheckpointError, match="was changed or replaced .* load the"):
        source.load(loading)
    assert n_open_files() == n_files
