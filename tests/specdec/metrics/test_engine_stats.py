"""Engine metrics: sums over all generations, and the actual passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf_models import save_tiny_gguf
from stepping import Stepping
from tiny_pair import save_model

import specdec
from backends.attention.batch import BLOCK_SIZE
from specdec.api import LLM
from specdec.metrics.recorder import Totals
from specdec.metrics.stats import EngineStats, sum_of
from specdec.policy.cost_model import CostModel

PROMPT = [7 + i % 60 for i in range(2 * BLOCK_SIZE + 5)]
OPTIONS: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True}


def load(tmp_path: Path, **more: Any) -> LLM:
    target = save_model(tmp_path / "target", seed=0)
    draft = save_model(tmp_path / "draft", seed=0, num_hidden_layers=2)
    return specdec.load(target, draft, **{"ctx_size": 256, "num_draft_tokens": 4, **more})


def test_all_together_are_the_sum_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(tmp_path, kv_tokens=1024) as llm:
        assert llm.stats.passes == 0
        num_tokens: list[int] = []
        run = llm.target.forward

        def noted(batch: Any) -> Any:
            num_tokens.append(sum(len(item.token_ids) for item in batch))
            return run(batch)

        monkeypatch.setattr(llm.target, "forward", noted)
        results = llm.generate([PROMPT, PROMPT, [5, 6, 7]], **OPTIONS)
        results.append(llm.generate([80, 81], n=2, temperature=0.9, seed=1, **OPTIONS))
        actual, each = llm.stats, [result.stats for result in results]
        assert actual.requests == actual.first_tokens == 4
        for name in (
            "prompt_tokens reused_prompt_tokens generated_tokens drafted_tokens accepted_tokens "
            "ngram_hits queue_seconds"
        ).split():
            assert getattr(actual, name) == pytest.approx(sum(getattr(item, name) for item in each))
        assert actual.first_token_seconds == pytest.approx(
            sum(item.time_to_first_token for item in each)
        )
        assert actual.sequence_passes == sum(item.passes for item in each)
        assert actual.passes == len(num_tokens), "passes that sequences share count once"
        assert actual.batch_tokens == sum(num_tokens)
        n_of_second = 2  # output of the last prompt, too short to wait for
        n_computed = actual.prompt_tokens - actual.reused_prompt_tokens + n_of_second
        assert actual.prefill_tokens == n_computed
        assert actual.tokens_per_pass == actual.generated_tokens / len(num_tokens)
        assert (actual.sequences_running, actual.sequences_waiting) == (0, 0)
        assert actual.memory_budget_bytes == llm.plan.budget_bytes
    assert llm.stats.generated_tokens == actual.generated_tokens  # also for a closed model


def test_kv_that_sequences_share_is_in_use_once(tmp_path: Path) -> None:
    with load(tmp_path, kv_tokens=1024) as llm:
        text = llm.target.new_sequence()
        text.prefill(PROMPT)
        before = llm.target.kv_usage
        other = text.fork(2 * BLOCK_SIZE)
        assert before == (3 * BLOCK_SIZE, 0)
        assert llm.target.kv_usage == (3 * BLOCK_SIZE, 2 * BLOCK_SIZE)
        n_bytes = llm.target.kv_bytes * 2 * BLOCK_SIZE // llm.target.n_kv_allocated
        assert llm.stats.kv_shared_bytes == n_bytes
        other.close()
        text.close()
        assert llm.target.kv_usage == (0, 0)


@pytest.mark.slow
def test_preempted_sequences_are_counted(tmp_path: Path) -> None:
    with load(tmp_path, kv_tokens=320, num_draft_tokens=0) as llm:
        llm.session.engine.scheduler.kv.cost = CostModel(0.0, 0.0, 1.0)  # files are quicker
        llm.generate([[20, 21], [30, 31], [40, 41]], max_tokens=180, ignore_eos=True)
        actual = llm.stats
        assert actual.preempted > 0
        assert actual.swapped_in == actual.preempted
        assert actual.swapped_in_tokens >= BLOCK_SIZE * actual.preempted
        assert actual.prefill_tokens == actual.recomputed_tokens + actual.prompt_tokens
        assert actual.generated_tokens == 3 * 180


def test_running_and_waiting_sequences_are_reported(tmp_path: Path) -> None:
    with load(tmp_path, parallel=1) as llm:
        streams = [llm.stream([5 + i], **OPTIONS) for i in range(3)]
        with Stepping(llm) as steps:
            for stream in streams:
                stream.start()
            steps.next(streams[0])
            assert (llm.stats.sequences_running, llm.stats.sequences_waiting) == (1, 2)
            steps.cancel(*streams)
        assert (llm.stats.sequences_running, llm.stats.sequences_waiting) == (0, 0)
        assert llm.stats.requests == 3


def test_beams_count_their_passes(tmp_path: Path) -> None:
    with load(tmp_path, num_beams=2) as llm:
        result = llm.generate([5, 6, 7], num_beams=2, max_tokens=5, ignore_eos=True)
        actual = llm.stats
        assert actual.passes == 1 + result.stats.passes
        assert actual.batch_tokens == 3 + 2 * result.stats.passes
        assert result.stats.batch_tokens == 2 * result.stats.passes
        assert {time.num_tokens for time in result.stats.pass_times} == {2}


def test_the_wait_of_a_beam_search_is_reported(tmp_path: Path) -> None:
    with load(tmp_path, num_beams=2) as llm:
        result = llm.generate([5, 6, 7], num_beams=2, max_tokens=5, ignore_eos=True)
        assert 0.0 < result.stats.queue_seconds < result.stats.time_to_first_token
        assert llm.stats.queue_seconds == result.stats.queue_seconds


def test_the_sum_of_several_machines() -> None:
    totals = Totals()
    totals.add(passes=2, pass_seconds=0.5)
    totals.add_accepted(2)
    totals.add_accepted(1)
    item = totals.stats()
    both = sum_of([item, EngineStats(passes=1, accepted_by_depth=(1, 1, 1))])
    assert (both.passes, both.pass_seconds) == (3, 0.5)
    assert both.accepted_by_depth == (3, 2, 1)
    assert sum_of([]) == EngineStats()


@pytest.mark.gguf
def test_cells_that_sequences_share_are_in_use_once(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    model = save_tiny_gguf("llama", tmp_path / "m.gguf")
    with specdec.load(model, ctx_size=128, kv_tokens=256) as llm:
        text = llm.target.new_sequence()
        text.prefill([5, 6, 7, 8])
        other = text.fork(3)
        other.prefill([9])
        assert llm.target.kv_usage == (5, 3)
        other.close()
        assert llm.target.kv_usage == (4, 0)
        text.close()
