"""Generations in several threads, cancels, and per-generation metrics."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from forced_streaming import force_streaming
from hanging_storage import HangingStorage
from paused_generation import PROMPT, Generation, Pinned, Reader
from stepping import Stepping

import specdec
from specdec.api import LLM, CalledFromInside


def test_a_generation_inside_a_generation_is_refused(small_llm: LLM) -> None:
    expected = small_llm.generate(PROMPT, max_tokens=10).token_ids

    def nested(ids: Any, scores: Any) -> Any:
        small_llm.generate([1, 2], max_tokens=2)
        return scores

    with pytest.raises(CalledFromInside, match="inside of another one's pass"):
        small_llm.generate(PROMPT, max_tokens=5, logits_processors=[nested])
    assert small_llm.generate(PROMPT, max_tokens=10).token_ids == expected


@pytest.mark.slow
def test_a_second_thread_waits_for_the_pass_and_disturbs_nothing(small_llm: LLM) -> None:
    alone = small_llm.generate([9, 8], max_tokens=30).token_ids
    processor = Pinned()
    running = Generation(small_llm, processor)
    second = Reader(small_llm.stream([9, 8], max_tokens=30))
    processor.may_go_on.set()
    running.join()
    second.join()
    assert (running.error, second.error) == (None, None)
    assert sum((chunk.token_ids for chunk in second.chunks), ()) == alone


@pytest.mark.slow
def test_one_stream_in_two_threads(small_llm: LLM) -> None:
    """Every chunk goes to one of them."""
    stream = small_llm.stream(PROMPT, max_tokens=40)
    readers = [Reader(stream) for _ in range(2)]
    for reader in readers:
        reader.join()
        assert reader.error is None
    taken = [token for item in readers for chunk in item.chunks for token in chunk.token_ids]
    assert sorted(taken) == sorted(stream.result.token_ids)


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 3])
def test_a_stream_is_cancelled_by_another_thread(small_llm: LLM, beams: int) -> None:
    """A cancel between two passes keeps the tokens generated so far."""
    options = {"max_tokens": 40, "num_beams": beams, "cache_prompt": False}
    expected = small_llm.generate(PROMPT, **options).token_ids
    processor = Pinned()
    stream = small_llm.stream(PROMPT, logits_processors=[processor], **options)
    reader = Reader(stream)
    processor.reached.wait()
    cancelling = threading.Thread(target=stream.cancel)
    cancelling.start()
    while not stream.is_cancelled:
        pass
    processor.may_go_on.set()
    cancelling.join()
    reader.join()
    assert reader.error is None
    result = stream.result
    assert result.finish_reason == "cancelled"
    assert len(result.token_ids) < 40
    if beams == 1:
        assert result.token_ids == expected[: len(result.token_ids)]
        assert result.token_ids == sum((chunk.token_ids for chunk in reader.chunks), ())
    assert list(stream) == []
    assert small_llm.generate(PROMPT, **options).token_ids == expected


def test_a_cancel_by_another_thread_ends_a_pass_that_would_not_end(
    small_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass's storage hangs."""
    force_streaming(monkeypatch)
    storage = HangingStorage(monkeypatch)
    with specdec.load(small_target, ctx_size=256) as llm:
        expected = llm.generate(PROMPT, max_tokens=20).token_ids
        stream = llm.stream(PROMPT, max_tokens=20)
        with Stepping(llm) as steps:
            first = steps.next(stream)
            storage.hang()
        reader = Reader(stream)
        storage.wait_until_reached()
        stream.cancel()
        reader.join()
        assert storage.is_hanging
        assert reader.error is None
        n_tokens = len(stream.result.token_ids)
        assert len(first.token_ids) <= n_tokens < 20
        assert stream.result.token_ids == expected[:n_tokens]
        assert stream.result.finish_reason == "cancelled"
        storage.let_go()
        assert llm.generate(PROMPT, max_tokens=20).token_ids == expected


def test_a_cancel_inside_of_the_generation_ends_it_with_the_pass(small_llm: LLM) -> None:
    streams: list[Any] = []
    processor = Pinned(then=lambda: streams[0].cancel())
    processor.may_go_on.set()
    streams.append(small_llm.stream(PROMPT, max_tokens=20, logits_processors=[processor]))
    list(streams[0])
    assert streams[0].result.finish_reason == "cancelled"
    assert len(streams[0].result.token_ids) < 20


@pytest.mark.slow_except(1)
def test_cancels_at_any_time(small_llm: LLM) -> None:
    """The reader's loop ends, never in an error, and the next generation is unaffected."""
    expected = small_llm.generate(PROMPT, max_tokens=30).token_ids
    rng = random.Random(0)
    for _ in range(12):
        stream = small_llm.stream(PROMPT, max_tokens=30)
        reader = Reader(stream)
        time.sleep(rng.uniform(0.0, 0.03))
        stream.cancel()
        reader.join()
        assert reader.error is None
        assert stream.result.token_ids == expected[: len(stream.result.token_ids)]
        assert small_llm.generate(PROMPT, max_tokens=30).token_ids == expected


def test_a_users_error_stays_the_users(small_llm: LLM) -> None:
    def failing(ids: Any, scores: Any) -> Any:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        small_llm.generate(PROMPT, logits_processors=[failing])


def test_statistics_begin_with_the_first_chunk(
    small_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream made early does not count reads of another generation before it starts."""
    force_streaming(monkeypatch)
    with specdec.load(small_target, ctx_size=256, spec_type="none") as llm:
        early = llm.stream(PROMPT, max_tokens=4)
        other = llm.generate(PROMPT, max_tokens=60).stats
        assert early.result.stats.bytes_streamed == 0
        list(early)
        assert 0 < early.result.stats.bytes_streamed < other.bytes_streamed / 4
