"""Files that change between header reading and the end of loading give no model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from backend_kinds import Kind
from cpu_engine import CpuEngine
from open_files import n_open_files
from tiered import STORAGE, tiered_model

from backends.contract.source import Loading
from backends.cuda.source import HfGpuSource
from offload.formats.tensors import CheckpointError
from offload.placement.placement import Placement


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(bytes(8))
    os.utime(path, ns=(1, 1))  # a clock tick later, whatever the clock's resolution


def replace(path: Path) -> None:
    copy = shutil.copy2(path, path.with_name("copy"))
    os.replace(copy, path)


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("change", [overwrite, replace])
def test_a_changed_file_is_refused(
    streamed: Kind,
    change: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("backends.cuda.source.CudaEngine", lambda vram_bytes: CpuEngine())
    source: Any = Kind(streamed.name, tmp_path).source(is_exact=False)
    plan = Placement(source.layers, 2)
    if streamed.name == "device":
        source = HfGpuSource(source)
        plan = tiered_model(source.model, lambda layer, tensor: STORAGE)
    loading = Loading(plan, 16, 4, 4)
    source.load(loading).close()
    n_files = n_open_files()
    change(source.weight_file)
    with pytest.raises(CheckpointError, match="was changed or replaced .* load the"):
        source.load(loading)
    assert n_open_files() == n_files
