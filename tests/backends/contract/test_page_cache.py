"""A model held in memory, or streamed, is not in the page cache as well.

That cache counts in a memory cgroup: the model would be there twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from alone import own
from checkpoints import in_dtype, save_tiny_checkpoint
from gguf_models import save_tiny_gguf
from page_cache import forget, n_cached

from backends.contract.backend import PREFIX
from backends.contract.source import BackendOptions, Loading, ModelSource
from backends.hf.source import HfSource
from offload.placement.placement import Placement
from offload.placement.plan import min_host_bytes, plan_placement
from offload.units import GIB
from specdec.packing.pack import pack

SIZES = {"hidden_size": 128, "intermediate_size": 512}


def checkpoint(folder: Path) -> Path:
    """A checkpoint of 1.6 MB in one file."""
    save_tiny_checkpoint("llama", folder / "sharded", **SIZES)
    return in_dtype(folder / "sharded", folder / "whole", torch.bfloat16)


def packed(folder: Path) -> Path:
    pytest.importorskip("numba")
    pack(checkpoint(folder), folder / "packed")
    return folder / "packed"


def mixture(folder: Path) -> Path:
    save_tiny_checkpoint("qwen3-moe", folder / "sharded", hidden_size=128, moe_intermediate_size=64)
    return in_dtype(folder / "sharded", folder / "whole", torch.bfloat16)


def gguf(folder: Path) -> Path:
    return save_tiny_gguf("llama", folder / "m.gguf", n_layers=8, dtype="Q8_0", hidden=128)


def split_gguf(folder: Path) -> Path:
    return save_tiny_gguf("llama", folder / "m.gguf", n_layers=24, hidden=128, n_splits=3)


def gguf_mixture(folder: Path) -> Path:
    return save_tiny_gguf("qwen3moe", folder / "m.gguf", n_layers=8, hidden=128)


@dataclass(frozen=True)
class Case:
    """One way of loading a model."""

    save: Callable[[Path], Path]
    load_mode: str = "ram"
    streams: bool = False
    is_exact: bool = True


CASES = {
    "safetensors, ram": Case(checkpoint),
    "safetensors, streamed": Case(checkpoint, "stream", True),
    "safetensors, packed": Case(packed),
    "safetensors, mixture": Case(mixture),
    "gguf, ram": Case(gguf),
    "gguf, ram, repacked": Case(gguf, is_exact=False),
    "gguf, all resident": Case(gguf, "stream"),
    "gguf, streamed": Case(gguf, "stream", True),
    "gguf, split": Case(split_gguf),
    "gguf, mixture": Case(gguf_mixture),
}


def open_source(path: Path, options: BackendOptions) -> ModelSource:
    if path.is_dir():
        return HfSource(path, options)
    from backends.llama.source import GgufSource

    return GgufSource(path, options)


def placement(source: ModelSource, streams: bool) -> Placement:
    n_bytes = min_host_bytes(source.layers, 2) if streams else GIB
    return plan_placement(source.layers, n_bytes, n_slots=2 if streams else None)


@pytest.mark.slow_except(2)
@pytest.mark.parametrize("name", CASES)
def test_loading_and_computing_leave_nothing_there(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    if "gguf" in name:
        pytest.importorskip("llama_cpp")
    path = case.save(tmp_path)
    source = open_source(path, BackendOptions(1, is_exact=case.is_exact))
    files = {record.path for layer in source.layers for record in layer.tensors}
    for file in files:
        file.read_bytes()
        assert n_cached(file) > 0, "as anybody's reads leave it"
        forget(file)
    source.fingerprint()
    loading = Loading(placement(source, case.streams), 32, 4, 4, load_mode=case.load_mode)
    with source.load(loading) as backend:
        own(backend).prefill([5, 6, 7])
        own(backend).extend([8], [PREFIX])
        assert {file: n_cached(file) for file in files} == dict.fromkeys(files, 0)
