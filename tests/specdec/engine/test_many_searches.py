"""Beam searches beside each other and beside sequences: each equals itself alone."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from paused_generation import Pinned, Reader
from stepping import Stepping
from tiny_pair import save_model

import specdec
from specdec.api import LLM
from specdec.policy.cost_model import CostModel
from specdec.sampling.params import SamplingParams

LONG = [7 + i % 60 for i in range(240)]
SEARCH = SamplingParams(max_tokens=8, num_beams=3, ignore_eos=True)
TEXT = SamplingParams(max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model with memory for the longest prompt and its beams: five blocks of 64 tokens."""
    target = save_model(tmp_path_factory.mktemp("target"), seed=0)
    with specdec.load(target, ctx_size=256, num_beams=3, beam_span=8, parallel=4) as loaded:
        yield loaded


def alone(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
    actual = llm.generate(prompt, params, speculative=False, cache_prompt=False).token_ids
    llm.session.forget_prompt()
    return actual


def check_nothing_left(llm: LLM) -> None:
    assert not llm.session.engine._running
    assert not llm.session.engine.scheduler.running
    assert not llm.session.models.prefix_cache._in_use


def test_searches_of_many_threads(llm: LLM) -> None:
    prompts = [[token] * 60 for token in range(10, 18)]
    expected = [alone(llm, prompt, SEARCH) for prompt in prompts]
    streams = [llm.stream(prompt, SEARCH) for prompt in prompts]
    for reader in [Reader(stream) for stream in streams]:
        reader.join()
        assert reader.error is None
    assert [stream.result.token_ids for stream in streams] == expected
    check_nothing_left(llm)


def test_sequences_that_fill_the_cache_are_preempted_for_a_search_and_swapped_in(llm: LLM) -> None:
    prompts = [[token, 9] for token in (80, 81)]
    expected = [alone(llm, prompt, TEXT) for prompt in prompts]
    beams = alone(llm, LONG[::-1], SEARCH)
    streams = [llm.stream(prompt, TEXT) for prompt in prompts]
    search = llm.stream(LONG[::-1], SEARCH)
    with Stepping(llm) as steps:
        for stream in streams:
            steps.next(stream)
        assert len(llm.session.models.prefix_cache._in_use) == 2
        search.start()
    assert [chunk.token_ids for chunk in search] == [beams]
    for stream, tokens in zip(streams, expected, strict=True):
        assert sum(1 for _ in stream)
        assert stream.result.token_ids == tokens
    check_nothing_left(llm)


def test_a_search_is_prefilled_in_chunks_beside_a_streamed_sequence(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = LONG[100:200]
    expected, beams = alone(llm, [80, 9], TEXT), alone(llm, prompt, SEARCH)
    monkeypatch.setattr(llm.session.engine.scheduler, "cost", CostModel(0.0, 1.0, 0.1))
    beside, search = llm.stream([80, 9], TEXT), llm.stream(prompt, SEARCH)
    with Stepping(llm) as steps:
        taken = list(steps.next(beside).token_ids)
        before = llm.stats
        search.start()
    assert [chunk.token_ids for chunk in search] == [beams]
    after = llm.stats
    assert after.prefill_tokens - before.prefill_tokens == len(prompt)
    # Six rows make a pass half as long again as one; every other pass is the sequence's.
    n_chunks = math.ceil(len(prompt) / 6)
    assert after.passes - before.passes >= n_chunks + SEARCH.max_tokens - 1
    for chunk in beside:
        taken += chunk.token_ids
    assert tuple(taken) == expected
    check_nothing_left(llm)


def test_a_sequence_waits_while_a_search_has_the_capacity(llm: LLM) -> None:
    prompts = [[token, 9] for token in (80, 81)]
    expected = [alone(llm, prompt, TEXT) for prompt in prompts]
    beams = alone(llm, LONG[::-1], SEARCH)
    processor = Pinned()
    search = llm.stream(LONG[::-1], SEARCH, logits_processors=[processor])
    searching = Reader(search)
    processor.reached.wait()
    streams = [llm.stream(prompt, TEXT) for prompt in prompts]
    for stream in streams:
        stream.start()
    processor.may_go_on.set()
    readers = [Reader(stream) for stream in streams]
    for reader in (searching, *readers):
        reader.join()
        assert reader.error is None
    assert search.result.token_ids == beams
    assert [stream.result.token_ids for stream in streams] == expected
    check_nothing_left(llm)


def test_a_cancel_does_not_cut_a_pass_of_others(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cancelled sequence shares its passes with a search."""
    expected = alone(llm, LONG[:60], SEARCH)
    sequence, search = llm.stream([80, 81], TEXT), llm.stream(LONG[:60], SEARCH)
    cancelling = threading.Thread(target=sequence.cancel)
    cut: list[str] = []
    in_that_pass: list[str] = []
    run = llm.target.forward

    def noted(batch: Any) -> Any:
        if not cancelling.ident and len(batch) == 2:
            cancelling.start()
            cancelling.join(0.05)
            in_that_pass.extend(cut)
        return run(batch)

    with Stepping(llm) as steps:
        steps.next(sequence)
        search.start()
        monkeypatch.setattr(llm.target, "forward", noted)
        monkeypatch.setattr(llm.target, "request_cancel", lambda: cut.append("cut"))
    assert [chunk.token_ids for chunk in search] == [expected]
    cancelling.join()
    assert not in_that_pass
    check_nothing_left(llm)


def test_the_search_of_the_larger_priority_goes_first(llm: LLM) -> None:
    low = llm.stream([80, 81], SEARCH)
    high = llm.stream([90, 91], SEARCH, priority=1)
    with Stepping(llm) as steps:
        for stream in (low, high):
            stream.start()
        while not high.is_over:
            steps.step()
        assert not low.is_over
    assert list(high)
    assert list(low)
    check_nothing_left(llm)


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("seed", [1, 2])
def test_beams_that_hold_all_live_nodes_end_no_sequence(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """Sequences wait until one node each is left for them."""
    target = save_model(tmp_path_factory.mktemp("target"), seed=0)
    size: dict[str, Any] = {"ctx_size": 256, "kv_tokens": 1000, "num_beams": 7, "beam_span": 2}
    with specdec.load(target, parallel=4, num_draft_tokens=0, **size) as llm:
        streams = [llm.stream([80 + i, 9], TEXT) for i in range(4)]
        expected = [alone(llm, [80 + i, 9], TEXT) for i in range(4)]
        params = SamplingParams(
            max_tokens=40, num_beams=7, temperature=1.0, seed=seed, ignore_eos=True
        )
        wide = llm.stream(LONG[:20], params)
        with Stepping(llm) as steps:
            for stream in streams:
                steps.next(stream)
            wide.start()
        with pytest.raises(specdec.SpecdecError, match="7 beams need"):
            list(wide)
        for stream, tokens in zip(streams, expected, strict=True):
            assert sum(1 for _ in stream)
            assert stream.result.token_ids == tokens
        check_nothing_left(llm)
