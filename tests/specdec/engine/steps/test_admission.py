"""Prefill chunks beside decoding sequences: the length of passes, and the order of requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from many_sequences import LONG, PROMPTS, alone, load, params
from stepping import Stepping

from specdec.api import LLM
from specdec.checks import ConfigError
from specdec.policy.cost_model import CostModel


@pytest.mark.slow
def test_a_long_prompt_is_prefilled_in_chunks_beside_others(
    fresh: LLM, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pass has more tokens than make it half as long again, drafts included; alone it is
    scheduled at once."""
    with load(tmp_path_factory, kv_tokens=400) as llm:
        batches: list[list[int]] = []
        num_tokens: list[int] = []
        run = llm.target.forward

        def noted(batch: Any) -> Any:
            batches.append([len(item.token_ids) for item in batch if item.parents is None])
            num_tokens.append(sum(len(item.token_ids) for item in batch))
            return run(batch)

        monkeypatch.setattr(llm.target, "forward", noted)
        cost = CostModel(0.0, 1.0, 0.1)
        monkeypatch.setattr(llm.session.engine.scheduler, "cost", cost)
        decoding = llm.stream([80, 81], params(0.0).replace(max_tokens=60))
        with Stepping(llm) as steps:
            steps.next(decoding)
            assert batches == [[2]]
            batches.clear()
            num_tokens.clear()
            late = llm.stream(LONG, params(0.0))
            steps.next(late)
            assert num_tokens == [6] * 14
            # 1.5 * (1 + 0.1) = 1.65 s allow 6 tokens, one of them of the other sequence.
            assert batches[:14] == [[5]] * 14
            assert len(batches) == 14
        rest = [token for chunk in late for token in chunk.token_ids]
        assert late.result.token_ids == alone(fresh, (2, 0.0, None))
        assert tuple(rest) == late.result.token_ids[-len(rest) :]
        decoding.cancel()
        batches.clear()
        llm.generate([*LONG[::-1]], params(0.0))
        assert batches[0] == [len(LONG)]


def test_a_prompt_alone_takes_passes_of_equal_length(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short last pass would wait for its read of the model."""
    with load(tmp_path_factory, kv_tokens=400) as llm:
        batches: list[list[int]] = []
        run = llm.target.forward

        def noted(batch: Any) -> Any:
            batches.append([len(item.token_ids) for item in batch if item.parents is None])
            return run(batch)

        monkeypatch.setattr(llm.target, "forward", noted)
        scheduler = llm.session.engine.scheduler
        monkeypatch.setattr(scheduler, "cost", CostModel(0.0, 1.0, 0.3))
        monkeypatch.setattr(scheduler, "observe_prefill", lambda *measured: None)
        limit = scheduler._max_prompt_tokens()
        assert len(LONG) / 3 < limit < len(LONG) / 2
        llm.generate(LONG, params(0.0))
        assert sum(sum(batch) for batch in batches[:3]) == len(LONG)
        lengths = [batch[0] for batch in batches[:3]]
        assert max(lengths) - min(lengths) <= 2
        assert max(lengths) <= limit


def test_passes_over_a_prompt_grow_after_those_of_a_longer_context(
    fresh: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of few tokens say nothing of those of many, which were slow once."""
    scheduler, cost = fresh.session.engine.scheduler, CostModel(1.0, 0.1, 0.01)
    monkeypatch.setattr(scheduler, "cost", cost)
    monkeypatch.setattr(scheduler.kv, "cost", cost)
    cost.observe(1, 1.0)
    for num_tokens in (1024, 512, 256, 128):
        scheduler.observe_prefill(num_tokens, 0.1 * num_tokens)
    assert scheduler._max_prompt_tokens() < 150
    for _ in range(8):
        num_tokens = scheduler._max_prompt_tokens()
        scheduler.observe_prefill(num_tokens, max(1.0, 0.02 * num_tokens))
    assert scheduler._max_prompt_tokens() == pytest.approx(10.0 / 0.02, rel=0.02)


@pytest.mark.slow
def test_its_draft_is_prefilled_in_chunks_beside_it(
    fresh: LLM, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step after the prompt's end is no longer than others."""
    with load(tmp_path_factory, kv_tokens=400) as llm:
        assert llm.draft is not None
        batches: list[list[int]] = []
        run = llm.draft.forward

        def noted(batch: Any) -> Any:
            batches.append([len(item.token_ids) for item in batch if item.parents is None])
            return run(batch)

        monkeypatch.setattr(llm.draft, "forward", noted)
        cost = CostModel(0.0, 1.0, 0.1)
        monkeypatch.setattr(llm.session.engine.scheduler, "cost", cost)
        decoding = llm.stream([80, 81], params(0.0).replace(max_tokens=60))
        with Stepping(llm) as steps:
            steps.next(decoding)
            late = llm.stream(LONG, params(0.0))
            assert steps.rest(late)
        assert late.result.token_ids == alone(fresh, (2, 0.0, None))
        entered = [num_tokens for batch in batches for num_tokens in batch]
        assert [num_tokens for num_tokens in entered if num_tokens > 2][:13] == [5] * 13
        # The other sequence had no drafts meanwhile, and its draft catches up.
        assert max(entered) < 2 * 14
        decoding.cancel()


def sequences(n: int, *, streams_output: bool = True) -> list[Any]:
    return [
        SimpleNamespace(request=SimpleNamespace(streams_output=streams_output), min_step_tokens=1)
    ] * n


def test_a_prompt_is_scheduled_however_long_its_tokens_take(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(tmp_path_factory, kv_tokens=400) as llm:
        scheduler = llm.session.engine.scheduler
        monkeypatch.setattr(scheduler, "cost", CostModel(0.0, 0.0, 1.0))
        assert [scheduler._max_num_tokens(sequences(n)) for n in (1, 2, 8)] == [2, 3, 12]
        monkeypatch.setattr(scheduler, "cost", CostModel(0.0, 0.05, 0.01))  # in memory
        assert [scheduler._max_num_tokens(sequences(n)) for n in (1, 20)] == [20, 32]
        # Sequences without a streaming reader notice no gaps.
        unread = [
            SimpleNamespace(request=SimpleNamespace(streams_output=False), min_step_tokens=1)
        ] * 20
        assert scheduler._max_num_tokens(unread) == llm.max_context


def test_prefill_chunks_follow_measured_passes(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same measurements decide the size of trees and the preemption of sequences."""
    with load(tmp_path_factory, kv_tokens=400) as llm:
        scheduler, cost = llm.session.engine.scheduler, llm.session.models.pair_statistics.cost
        assert scheduler.cost is scheduler.kv.cost is cost
        assert cost is not llm.plan.cost_model
        cost = CostModel(0.0, 0.05, 0.01)
        monkeypatch.setattr(scheduler, "cost", cost)
        assert scheduler._max_num_tokens(sequences(1)) == 20
        for num_tokens in (1, 8, 32):
            cost.observe(num_tokens, 0.5 * cost.planned_seconds(num_tokens))
        assert scheduler._max_num_tokens(sequences(1)) == 45


def test_a_pass_has_no_more_rows_of_logits_than_reserved(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees leave memory for the rows of sequences that prefill beside them."""
    with load(tmp_path_factory, kv_tokens=900, parallel=4, num_draft_tokens=4) as llm:
        num_tokens: list[int] = []
        run = llm.target.forward

        def noted(batch: Any) -> Any:
            num_tokens.append(sum(len(rows.logit_positions) for rows in batch))
            return run(batch)

        monkeypatch.setattr(llm.target, "forward", noted)
        streams = [llm.stream(prompt, params(0.0)) for prompt in (PROMPTS[0], PROMPTS[4])]
        for stream in streams:
            stream.start()
        for stream in streams:
            next(stream)
        streams += [llm.stream(prompt, params(0.0)) for prompt in ([30, 31], [40, 41])]
        for stream in streams:
            stream.start()
        next(streams[2])
        assert max(num_tokens) <= llm.session._factory.max_beams == 11


def test_a_larger_priority_is_scheduled_first(tmp_path_factory: pytest.TempPathFactory) -> None:
    with load(tmp_path_factory, parallel=1) as llm:
        streams = [llm.stream(ids, params(0.0), priority=n) for n, ids in enumerate(PROMPTS[:3])]
        with Stepping(llm):
            for stream in streams:
                stream.start()
        for stream in streams:
            assert len("".join(chunk.text for chunk in stream)) > 0
        waited = [stream.result.stats.queue_seconds for stream in streams]
        assert waited[2] < waited[1] < waited[0]
        with pytest.raises(ConfigError, match="priority is 'high', must be int"):
            llm.stream([1], priority="high")
