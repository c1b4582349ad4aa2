"""Preempted sequences continue as if never interrupted, from a file or recomputed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf_models import save_tiny_gguf
from stepping import Stepping
from tiny_pair import save_model

import specdec
from backends.contract.backend import BackendError
from specdec.api import LLM
from specdec.policy.cost_model import CostModel

PROMPTS = [[20 + i, 21 + i, *range(30, 50)] for i in range(4)]
OPTIONS: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True, "logprobs": True, "seed": 3}
SLOW = CostModel(0.0, 0.0, 1.0)
"""Cost model of one second per token: a file is always quicker."""


@pytest.fixture(
    scope="module", params=["torch", "torch q8_0", pytest.param("gguf", marks=pytest.mark.gguf)]
)
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A model and the types of its KV cache."""
    folder = tmp_path_factory.mktemp("model")
    kind, _, cache_type = request.param.partition(" ")
    types = dict.fromkeys(("cache_type_k", "cache_type_v"), cache_type or None)
    if kind == "torch":
        return save_model(folder, seed=0), types
    pytest.importorskip("llama_cpp")
    return save_tiny_gguf("llama", folder / "m.gguf"), types


@pytest.fixture
def llm(
    model: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LLM]:
    """A model with memory for all of the sequences only while they are short."""
    path, types = model
    sizes = {"ctx_size": 192, "kv_tokens": 256, "parallel": 4, "threads": 1}
    with specdec.load(path, num_draft_tokens=4, **sizes, **types) as loaded:
        kv_manager = loaded.session.engine.scheduler.kv
        monkeypatch.setattr(kv_manager, "cost", SLOW)
        monkeypatch.setattr(kv_manager.files, "_find_folder", lambda: tmp_path)
        yield loaded


def check_equal(llm: LLM, temperature: float = 0.0) -> None:
    results = llm.generate(PROMPTS, temperature=temperature, **OPTIONS)
    for prompt, result in zip(PROMPTS, results, strict=True):
        expected = llm.generate(prompt, temperature=temperature, cache_prompt=False, **OPTIONS)
        assert result.token_ids == expected.token_ids
        assert result.logprobs == expected.logprobs, "to the bit"
    kv_manager = llm.session.engine.scheduler.kv
    assert kv_manager.files.n_bytes == 0


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_their_kv_comes_back_from_files(llm: LLM, temperature: float) -> None:
    check_equal(llm, temperature)
    actual = llm.stats
    assert actual.preempted > 0
    assert actual.swapped_in > 0
    assert actual.swapped_in_tokens > len(PROMPTS[0]) * actual.swapped_in
    assert actual.recomputed_tokens == 0, "nothing else was lost"


def full(_: int, __: int, ___: int) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.slow
def test_a_full_disk_makes_them_recomputed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", full)
    check_equal(llm)
    assert llm.stats.preempted > 0
    assert llm.stats.swapped_in == 0
    assert llm.stats.recomputed_tokens > 0


@pytest.mark.slow
def test_recomputing_is_used_if_it_is_quicker(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.session.engine.scheduler.kv, "cost", CostModel(0.0, 0.0, 1e-6))
    check_equal(llm)
    assert llm.stats.preempted > 0
    assert llm.stats.swapped_in == 0


@pytest.mark.slow
def test_a_file_that_cannot_be_read_is_none(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise BackendError("damaged")

    monkeypatch.setattr(type(llm.target), "_load_prefix", broken)
    check_equal(llm)
    assert llm.stats.preempted > 0
    assert llm.stats.swapped_in == 0


def open_unlinked_files(folder: Path) -> list[str]:
    """Return unlinked files below the folder that this process still has open."""
    links = []
    for item in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(item))
        except FileNotFoundError:
            continue
    return [link for link in links if link.startswith(str(folder))]


def begin_all(llm: LLM, steps: Stepping) -> list[Any]:
    """Start five sequences, one of which is preempted."""
    streams = [llm.stream([9 + i, *PROMPTS[0]], **OPTIONS) for i in range(5)]
    for stream in streams:
        stream.start()
    while not llm.session.engine.scheduler.kv.files.n_bytes:
        steps.step()
    return streams


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("end", ["cancel", "close"])
def test_who_is_over_leaves_no_file(llm: LLM, tmp_path: Path, end: str) -> None:
    with Stepping(llm) as steps:
        streams = begin_all(llm, steps)
        assert open_unlinked_files(tmp_path)
        assert not list(tmp_path.iterdir()), "a kill would leave it behind"
        if end == "cancel":
            steps.cancel(*streams)
        else:
            steps.close(llm)
    assert not open_unlinked_files(tmp_path)


def test_a_file_has_to_be_worth_it(llm: LLM) -> None:
    """Shared KV is attached again, which takes no memory; a few tokens are recomputed quicker."""
    kv_manager = llm.session.engine.scheduler.kv
    assert kv_manager._pays_off(100, num_shared=50, num_bytes=1000)
    assert not kv_manager._pays_off(100, num_shared=51, num_bytes=1000)
    kv_manager.cost = CostModel(1.0, 0.0, 0.1)  # 9 more rows hide behind the reads
    assert not kv_manager._pays_off(9, num_shared=0, num_bytes=1000)
    assert kv_manager._pays_off(10, num_shared=0, num_bytes=1000)
    assert not kv_manager._pays_off(10, num_shared=0, num_bytes=10**7)
    sequence = llm.session.models.prefix_cache.allocate([5, 6, 7])
    sequence.prefill([5, 6, 7])
    assert llm.session.models.prefix_cache.n_common([5, 6, 8, 9]) == 2
    assert llm.session.models.prefix_cache.n_common([5, 6, 8, 9], sequence) == 0
    llm.session.models.prefix_cache.drop(sequence)
