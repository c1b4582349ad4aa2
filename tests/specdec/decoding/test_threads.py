"""As many threads compute and read as were asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from forced_streaming import force_streaming
from gguf_models import save_tiny_gguf
from streaming import reader_threads
from tiny_pair import save_model

import specdec

SIZE = {"ctx_size": 64, "num_draft_tokens": 4}


@pytest.fixture(params=["torch", pytest.param("gguf", marks=pytest.mark.gguf)])
def model(request: Any, tmp_path: Path) -> Path:
    """With layers that are larger than a page."""
    if request.param == "torch":
        return save_model(tmp_path / "model", seed=0)
    pytest.importorskip("llama_cpp")
    return save_tiny_gguf("llama", tmp_path / "m.gguf", hidden=256, feed_forward=512)


@pytest.mark.parametrize("n_threads", [1, 3])
def test_readers(model: Path, n_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    force_streaming(monkeypatch)
    before = set(reader_threads())
    with specdec.load(model, io_threads=n_threads, spec_type="none", **SIZE) as llm:
        assert llm.plan.residency.n_streamed_layers > 0
        own = set(reader_threads()) - before  # beside those that load what stays in memory
        assert sum(one.name.startswith("specdec-reader") for one in own) == n_threads


@pytest.mark.usefixtures("_torch_threads")
def test_torchs_threads(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", seed=0)
    torch.set_num_threads(1)
    with specdec.load(model, model, threads=3, **SIZE):
        assert torch.get_num_threads() == 3


@pytest.mark.gguf
def test_llama_cpps_threads(tmp_path: Path) -> None:
    """Of the target and of the draft."""
    llama_cpp = pytest.importorskip("llama_cpp")
    model = save_tiny_gguf("llama", tmp_path / "m.gguf")
    with specdec.load(model, model, threads=3, **SIZE) as llm:
        for backend in llm.session.backends:
            assert llama_cpp.llama_n_threads(backend._context.handle) == 3
            assert llama_cpp.llama_n_threads_batch(backend._context.handle) == 3
