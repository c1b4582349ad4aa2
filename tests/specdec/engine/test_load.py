"""Passes use the processors that other programs leave free; the output stays the same."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_models import save_tiny_gguf
from tiny_pair import save_model

import specdec
from backends.contract.exactness import Exactness
from backends.hf import runner as hf_runner
from backends.llama.batch import Batch
from backends.llama.context import LlamaContext
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


@pytest.fixture
def threads_of_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of threads of each pass, for either library."""
    actual: list[int] = []
    run_model, decode = hf_runner.run_model, LlamaContext.decode

    def run_torch(*args: Any) -> torch.Tensor:
        actual.append(torch.get_num_threads())
        return run_model(*args)

    def run_llama(context: LlamaContext, batch: Batch) -> int:
        code = decode(context, batch)
        actual.append(context._library.llama_n_threads(context.handle))
        return code

    monkeypatch.setattr(hf_runner, "run_model", run_torch)
    monkeypatch.setattr(LlamaContext, "decode", run_llama)
    return actual


@pytest.mark.slow_except(1)
@pytest.mark.usefixtures("two_cpus")
def test_threads_follow_the_load_between_passes(
    model: Path, threads_of_passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three passes have one thread; each row keeps its bits."""
    free = cycle([2, 1, 1])
    with specdec.load(model, **SIZE) as llm:
        monkeypatch.setattr(cpus, "free_cpus", lambda: 2)
        expected = llm.generate(PROMPT, max_tokens=20, logprobs=3)
        assert threads_of_passes[-1] == 2
        if llm.plan.exactness.is_exact and not llm.plan.exactness.is_thread_invariant:
            pytest.skip("sums depend on the number of threads on this machine: it stays")
        llm.session.forget_prompt()
        monkeypatch.setattr(cpus, "free_cpus", lambda: next(free))
        threads_of_passes.clear()
        actual = llm.generate(PROMPT, max_tokens=20, logprobs=3)
    assert set(threads_of_passes) == {1, 2}
    assert actual.token_ids == expected.token_ids
    assert actual.logprobs == expected.logprobs  # floats, compared by bits


@pytest.mark.slow
def test_threads_that_were_asked_for_stay(
    model: Path, threads_of_passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpus, "free_cpus", lambda: 1)
    with specdec.load(model, threads=2, **SIZE) as llm:
        llm.generate(PROMPT, max_tokens=4)
    assert set(threads_of_passes) == {2}


@pytest.mark.slow
@pytest.mark.usefixtures("two_cpus")
def test_where_sums_depend_on_threads_their_number_stays(
    model: Path, threads_of_passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Exactness, "can_change_threads", lambda self: False)
    monkeypatch.setattr(cpus, "free_cpus", lambda: 1)
    with specdec.load(model, **SIZE) as llm:
        llm.generate(PROMPT, max_tokens=4)
    assert set(threads_of_passes) == {2}
