"""Scheduling and preemption when the KV cache is full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf_models import save_tiny_gguf
from tiny_pair import save_model

import specdec
from specdec.api import LLM
from specdec.sampling.params import SamplingParams

SHORT = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"), seed=0)


@pytest.fixture
def llm(target: Path) -> Iterator[LLM]:
    with specdec.load(target, ctx_size=256, kv_tokens=512, num_draft_tokens=0) as loaded:
        yield loaded


def prompt(n_tokens: int, step: int) -> list[int]:
    return [7 + i * step % 61 for i in range(n_tokens)]


def test_no_prompt_without_capacity_is_scheduled(llm: LLM) -> None:
    """Prompts still to be computed are counted as well."""
    prompts = [prompt(180, step) for step in (1, 3, 5, 7)]
    expected = [llm.generate(item, SHORT, cache_prompt=False).token_ids for item in prompts]
    llm.session.forget_prompt()
    assert [item.token_ids for item in llm.generate(prompts, SHORT)] == expected
    assert llm.stats.preempted == 0


@pytest.mark.slow
def test_ended_sequences_are_dropped_before_a_running_one(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory suffices for the next token of each sequence, but not of all."""
    num_retained: list[int] = []
    kv_manager = llm.session.engine.scheduler.kv
    preempted = kv_manager.preempt

    def noted(job: Any) -> None:
        num_retained.append(len(llm.session.models.prefix_cache.cached))
        preempted(job)

    monkeypatch.setattr(kv_manager, "preempt", noted)
    for step in (1, 3):
        llm.generate(prompt(100, step), SHORT)
    prompts = [[token] * 50 for token in (30, 40, 50, 60)]
    llm.generate(prompts, SamplingParams(max_tokens=100, ignore_eos=True))
    assert not any(num_retained)


@pytest.mark.slow
@pytest.mark.gguf
def test_more_sequences_than_llama_cpp_has(tmp_path: Path) -> None:
    """llama.cpp needs two for each running or cached sequence: the oldest cached ones are dropped,
    and the last requests wait."""
    pytest.importorskip("llama_cpp")
    model = save_tiny_gguf("llama", tmp_path / "m.gguf")
    with specdec.load(model, ctx_size=64, kv_tokens=9000, parallel=130, threads=1) as llm:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        prompts = [[5 + i % 80, 6 + i // 80, 7] for i in range(260)]
        results = llm.generate(prompts, params)
        for i in (0, 128, 259):
            alone = llm.generate(prompts[i], params, speculative=False, cache_prompt=False)
            assert results[i].token_ids == alone.token_ids
        assert llm.stats.preempted == 0


@pytest.mark.slow
def test_blocks_that_sequences_begin_in_one_pass_are_foreseen(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of one length do so together; pinned layers must leave memory for it."""
    with specdec.load(target, ctx_size=256, kv_tokens=2048, parallel=16, num_draft_tokens=0) as llm:
        backend: Any = llm.target
        run = backend.forward
        new: list[tuple[int, int]] = []

        def noted(batch: Any) -> Any:
            n_tokens = llm.session.models.prefix_cache.n_committed + sum(
                len(item.token_ids) for item in batch
            )
            foreseen, before = backend.kv_growth_bytes(n_tokens), backend.kv_bytes
            actual = run(batch)
            new.append((backend.kv_bytes - before, foreseen))
            return actual

        monkeypatch.setattr(backend, "forward", noted)
        llm.generate([[5 + i, 6, 7] for i in range(16)], SHORT.replace(max_tokens=70))
        llm.generate(prompt(70, 3), SHORT.replace(n=8, temperature=1.0, seed=1))
        assert max(new)[0] > 10 * backend._pool.block_bytes
        assert all(grown <= foreseen for grown, foreseen in new[1:])
