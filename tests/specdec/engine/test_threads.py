"""Exactly the requested number of threads compute and read."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from forced_streaming import force_streaming
from gguf_models import save_tiny_gguf
from streaming import reader_threads
from tiny_pair import save_model

import specdec
from specdec.engine import session_statistics

SIZE = {"ctx_size": 64, "num_draft_tokens": 4}


@pytest.fixture(params=["torch", pytest.param("gguf", marks=pytest.mark.gguf)])
def model(request: Any, tmp_path: Path) -> Path:
    """A model whose layers are larger than a page."""
    if request.param == "torch":
        return save_model(tmp_path / "model", seed=0)
    pytest.importorskip("llama_cpp")
    return save_tiny_gguf("llama", tmp_path / "m.gguf", hidden=256, feed_forward=512)


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("n_threads", [1, 3])
def test_readers(model: Path, n_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    force_streaming(monkeypatch)
    before = set(reader_threads())
    with specdec.load(model, io_threads=n_threads, spec_type="none", **SIZE) as llm:
        assert llm.plan.placement.n_streamed_layers > 0
        own = set(reader_threads()) - before  # besides those that load resident weights
        assert sum(item.name.startswith("specdec-reader") for item in own) == n_threads


@pytest.mark.usefixtures("_torch_threads")
def test_torchs_threads(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", seed=0)
    torch.set_num_threads(1)
    with specdec.load(model, model, threads=3, **SIZE) as llm:
        assert llm.session.engine.call(torch.get_num_threads) == 3  # each thread has its own


@pytest.mark.gguf
def test_llama_cpps_threads(tmp_path: Path) -> None:
    """llama.cpp's threads of the target and of the draft."""
    llama_cpp = pytest.importorskip("llama_cpp")
    model = save_tiny_gguf("llama", tmp_path / "m.gguf")
    with specdec.load(model, model, threads=3, **SIZE) as llm:
        for backend in llm.session.models.backends:
            assert llama_cpp.llama_n_threads(backend._context.handle) == 3
            assert llama_cpp.llama_n_threads_batch(backend._context.handle) == 3


def test_no_model_is_built_beside_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape is built after the first output, or for callers who read it before. While
    transformers builds, torch's default dtype is changed: passes would compute with it."""
    asked: list[bool] = []
    monkeypatch.setattr(session_statistics, "model_flops", lambda *_: asked.append(True))
    with specdec.load(save_model(tmp_path / "model", seed=0), spec_type="none", **SIZE) as llm:
        is_inside, may_end = threading.Event(), threading.Event()
        engine: Any = llm.session.engine
        one_step = engine.step

        def waits(batch: Any) -> None:
            is_inside.set()
            assert may_end.wait(60)
            one_step(batch)

        monkeypatch.setattr(engine, "step", waits)
        computing = threading.Thread(target=lambda: llm.generate([1, 2], max_tokens=3))
        looking = threading.Thread(target=lambda: llm.session.statistics.model_flops)
        computing.start()
        assert is_inside.wait(60)
        looking.start()
        looking.join(0.3)
        were_asked = list(asked)
        may_end.set()
        computing.join(60)
        looking.join(60)
        assert not computing.is_alive()
        assert not looking.is_alive()
    assert were_asked == []
    assert asked == [True]
