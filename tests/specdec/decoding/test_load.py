"""Passes use the processors that other programs leave free, and the text stays the same."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_models import save_tiny_gguf
from tiny_pair import save_model

import specdec
from offload.process import cpus

SIZE = {"ctx_size": 64, "spec_type": "none"}
PROMPT = [1, 2, 3, 4, 5]

pytestmark = pytest.mark.usefixtures("_torch_threads")


@pytest.fixture(params=["torch", pytest.param("gguf", marks=pytest.mark.gguf)])
def model(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if request.param == "torch":
        return save_model(tmp_path / "model", seed=0)
    pytest.importorskip("llama_cpp")
    return save_tiny_gguf("llama", tmp_path / "m.gguf", hidden=256, feed_forward=512)


@pytest.fixture
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("backends.hf.threads", "backends.llama.source", "backends.llama.context"):
        monkeypatch.setattr(f"{module}.usable_cpus", lambda: 2)
    monkeypatch.setattr("backends.hf.threads._default_threads", lambda: 2)


def n_threads_of(llm: specdec.LLM) -> int:
    context = getattr(llm.target, "_context", None)
    if context is None:
        return torch.get_num_threads()
    import llama_cpp

    return llama_cpp.llama_n_threads(context.handle)


@pytest.mark.usefixtures("two_cpus")
def test_threads_follow_the_load_between_passes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other pass has one thread; each row keeps its bits."""
    free: Iterator[int] = cycle([2, 1, 1])
    n_threads = []

    def free_cpus() -> int:
        n_threads.append(n_free := next(free))
        return n_free

    with specdec.load(model, **SIZE) as llm:
        monkeypatch.setattr(cpus, "free_cpus", lambda: 2)
        expected = llm.generate(PROMPT, max_tokens=20, logprobs=3)
        assert n_threads_of(llm) == 2
        if llm.plan.exactness.is_exact and not llm.plan.exactness.is_thread_invariant:
            pytest.skip("sums depend on the number of threads on this machine: it stays")
        llm.session.forget_prompt()
        monkeypatch.setattr(cpus, "free_cpus", free_cpus)
        found = llm.generate(PROMPT, max_tokens=20, logprobs=3)
    assert {1, 2} <= set(n_threads)
    assert found.token_ids == expected.token_ids
    assert found.logprobs == expected.logprobs  # floats, to the bit


def test_threads_that_were_asked_for_stay(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "free_cpus", lambda: 1)
    with specdec.load(model, threads=2, **SIZE) as llm:
        llm.generate(PROMPT, max_tokens=4)
        assert n_threads_of(llm) == 2


@pytest.mark.usefixtures("two_cpus")
def test_where_sums_depend_on_threads_their_number_stays(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from backends.contract.exactness import Exactness

    monkeypatch.setattr(Exactness, "may_follow_load", lambda self: False)
    monkeypatch.setattr(cpus, "free_cpus", lambda: 1)
    with specdec.load(model, **SIZE) as llm:
        llm.generate(PROMPT, max_tokens=4)
        assert n_threads_of(llm) == 2
