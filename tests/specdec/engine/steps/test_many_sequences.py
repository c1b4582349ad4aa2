"""Many sequences in shared passes: each equals itself alone, whatever is added or preempted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from many_sequences import LONG, PROMPTS, alone, load, params
from paused_generation import Pinned, Reader
from stepping import Stepping

import specdec
from backends.contract.sequence import SequenceInput
from specdec.api import LLM
from specdec.checks import ConfigError

REQUESTS = st.tuples(
    st.sampled_from(range(len(PROMPTS))),
    st.sampled_from([0.0, 0.8]),
    st.sampled_from([None, "plain", "chain"]),
)


def options(mode: str | None, llm: LLM) -> dict[str, Any]:
    if mode == "plain":
        return {"speculative": False}
    if mode == "chain":
        return {"spec": specdec.SpecConfig(num_draft_tokens=3, tree_width=1, draft_depth=3)}
    return {}


@pytest.fixture(scope="module", params=[128, 400], ids=lambda n: f"kv {n}")
def llm(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model with memory for one sequence, so that others are preempted, or for several."""
    with load(tmp_path_factory, kv_tokens=request.param, parallel=4) as loaded:
        yield loaded


@pytest.mark.slow
@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_sequences_that_come_and_go_at_random(llm: LLM, fresh: LLM, data: st.DataObject) -> None:
    running: list[tuple[Any, Any, list[int]]] = []
    stream: Any

    def go_on(index: int) -> None:
        stream, request, taken = running[index]
        chunk = next(stream, None)
        if chunk is not None:
            taken.extend(chunk.token_ids)
            return
        assert tuple(taken) == stream.result.token_ids == alone(fresh, request)
        del running[index]

    for _ in range(data.draw(st.integers(3, 40))):
        action = data.draw(st.sampled_from(["begin", "next", "next", "next", "cancel", "drop"]))
        if action == "begin" or not running:
            request = data.draw(REQUESTS)
            number, temperature, mode = request
            stream = llm.stream(PROMPTS[number], params(temperature), **options(mode, llm))
            running.append((stream, request, []))
            continue
        index = data.draw(st.integers(0, len(running) - 1))
        if action == "next":
            go_on(index)
        else:
            stream, request, taken = running.pop(index)
            if action == "cancel":
                stream.cancel()
                actual = stream.result.token_ids
                assert actual == alone(fresh, request)[: len(actual)]
                assert list(actual[: len(taken)]) == taken
    while running:
        go_on(0)
    stream = None  # an unreferenced stream is collected
    check_nothing_left(llm)


def check_nothing_left(llm: LLM) -> None:
    """Check that only the prefix cache holds KV."""
    llm.generate(PROMPTS[0], params(0.0))  # dropped streams end before this step
    engine = llm.session.engine
    assert not engine._running
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    assert not llm.session.models.prefix_cache._in_use
    assert not llm.session.models.draft_prefix_cache._in_use


@pytest.mark.slow
def test_a_list_of_prompts(llm: LLM, fresh: LLM) -> None:
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(14)]
    results = llm.generate(prompts, params(0.0))
    assert [result.token_ids for result in results] == [
        alone(fresh, (i % len(PROMPTS), 0.0, None)) for i in range(14)
    ]
    both = [params(0.0), params(0.8)]
    results = llm.generate(prompts[:2], both)
    expected = [alone(fresh, (0, 0.0, None)), alone(fresh, (1, 0.8, None))]
    assert [result.token_ids for result in results] == expected
    with pytest.raises(ConfigError, match="14 prompts have 2 sampling parameters"):
        llm.generate(prompts, both)
    check_nothing_left(llm)


def test_sequences_that_share_a_prompt_have_more_tokens_than_the_cache(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    prompts = [[*[7 + i % 60 for i in range(450)], 9 + last] for last in range(4)]
    with load(tmp_path_factory, ctx_size=512, kv_tokens=1024, parallel=4) as llm:
        llm.generate(prompts[0], max_tokens=1)
        results = llm.generate(prompts, params(0.0))
        for prompt, result in zip(prompts, results, strict=True):
            expected = llm.generate(prompt, params(0.0), speculative=False, cache_prompt=False)
            assert result.token_ids == expected.token_ids


@pytest.mark.slow_except(1)
def test_threads_share_passes(llm: LLM, fresh: LLM) -> None:
    requests = [(i % len(PROMPTS), (0.0, 0.8)[i % 2], None) for i in range(9)]
    for request in requests:
        alone(fresh, request)
    streams = [llm.stream(PROMPTS[i], params(temperature)) for i, temperature, _ in requests]
    readers = [Reader(stream) for stream in streams]
    for reader, stream, request in zip(readers, streams, requests, strict=True):
        reader.join()
        assert reader.error is None
        assert stream.result.token_ids == alone(fresh, request)
    check_nothing_left(llm)


def test_an_error_of_one_sequence_is_its_own(llm: LLM, fresh: LLM) -> None:
    def failing(ids: Any, scores: Any) -> Any:
        if ids.shape[1] > len(PROMPTS[0]) + 2:
            raise ValueError("mine")
        return scores

    good = llm.stream(PROMPTS[4], params(0.0))
    bad = llm.stream(PROMPTS[0], params(0.0), logits_processors=[failing])
    taken = list(next(good).token_ids)
    with pytest.raises(ValueError, match="mine"):
        list(bad)
    taken += [token for chunk in good for token in chunk.token_ids]
    assert tuple(taken) == alone(fresh, (4, 0.0, None))
    check_nothing_left(llm)


def test_a_failing_pass_ends_those_in_it_and_no_others(
    llm: LLM, fresh: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [llm.stream(PROMPTS[i], params(0.0)) for i in (0, 4)]
    run = llm.target.forward

    def failing(batch: Any) -> Any:
        run(batch)
        raise specdec.SpecdecError("the disk is gone")

    with monkeypatch.context() as patch, Stepping(llm) as steps:
        streams[1].start()
        steps.next(streams[0])
        patch.setattr(llm.target, "forward", failing)
        with pytest.raises(specdec.SpecdecError, match="the disk is gone"):
            steps.rest(streams[0])
    later = llm.generate(PROMPTS[1], params(0.0))
    assert later.token_ids == alone(fresh, (1, 0.0, None))
    check_nothing_left(llm)


def test_cancel_frees_rows_and_kv_by_the_next_pass(llm: LLM) -> None:
    first, second = (llm.stream(PROMPTS[i], params(0.0)) for i in (0, 4))
    with Stepping(llm) as steps:
        steps.next(first), steps.next(second)
        steps.cancel(first)
        (sequence,) = first._sequences
        assert sequence.kv is None
        assert len(llm.session.models.prefix_cache._in_use) == 1
        assert steps.rest(second)
    check_nothing_left(llm)


def test_a_cancel_beside_others_does_not_cut_their_pass(llm: LLM, fresh: LLM) -> None:
    processor = Pinned()
    pinned = llm.stream(PROMPTS[4], params(0.0), logits_processors=[processor])
    reader = Reader(pinned)
    processor.reached.wait()
    other = llm.stream(PROMPTS[0], params(0.0))
    cancelling = threading.Thread(target=other.cancel)  # during a pass of another one
    cancelling.start()
    processor.may_go_on.set()
    cancelling.join()
    reader.join()
    assert reader.error is None
    assert pinned.result.token_ids == alone(fresh, (4, 0.0, None))


@pytest.mark.slow
def test_the_last_request_is_preempted_and_swapped_in(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(tmp_path_factory, ctx_size=256, kv_tokens=320, num_draft_tokens=0) as llm:
        preempted: list[int] = []
        capacity = llm.session.engine.scheduler.kv
        original = capacity.preempt
        monkeypatch.setattr(
            capacity, "preempt", lambda item: preempted.append(item.arrival) or original(item)
        )
        expected = [params(0.0).replace(max_tokens=180) for _ in range(3)]
        prompts = [[20, 21], [30, 31], [40, 41]]
        results = llm.generate(prompts, expected)
        assert preempted, "the test is to make the cache overflow"
        assert 0 not in preempted, "who came first goes on"
        for prompt, result in zip(prompts, results, strict=True):
            again = llm.generate(prompt, expected[0], speculative=False, cache_prompt=False)
            assert result.token_ids == again.token_ids


def test_n_fitting_counts_what_a_pass_takes(llm: LLM) -> None:
    """Exactly the reported number fits."""
    llm.session.forget_prompt()
    sequences = [llm.target.new_sequence() for _ in range(6)]
    try:
        batch = [SequenceInput(sequence, LONG) for sequence in sequences]
        n_fitting = llm.target.n_fitting(batch)
        assert n_fitting > 0
        llm.target.forward(batch[:n_fitting])
        if n_fitting < len(batch):
            with pytest.raises(specdec.SpecdecError):
                llm.target.forward(batch[n_fitting : n_fitting + 1])
    finally:
        for sequence in sequences:
            sequence.close()
