"""Errors of a caller's own code fail its request, whatever they are, and no other one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forced_streaming import force_streaming
from hanging_storage import HangingStorage
from paused_generation import PROMPT
from stepping import Stepping

import specdec
from specdec.api import LLM

OTHER = [80, 81]
N_TOKENS = 12


def beside_another(llm: LLM, run: Callable[[], Any], error: type[BaseException]) -> None:
    """Check that `run` raises `error`, and that another request's tokens are as without it."""
    expected = llm.generate(OTHER, max_tokens=N_TOKENS, ignore_eos=True).token_ids
    other = llm.stream(OTHER, max_tokens=N_TOKENS, ignore_eos=True)
    next(other)
    with pytest.raises(error):
        run()
    for _ in other:
        pass
    assert other.result.token_ids == expected
    assert llm.generate(OTHER, max_tokens=N_TOKENS, ignore_eos=True).token_ids == expected
    assert not llm.session.engine._running


@pytest.mark.slow_except(4)
@pytest.mark.parametrize(
    "error", [ValueError, MemoryError, SystemExit, KeyboardInterrupt, GeneratorExit]
)
def test_an_error_in_a_logits_processor(small_llm: LLM, error: type[BaseException]) -> None:
    def fail(token_ids: Any, scores: Any) -> Any:
        raise error

    def run() -> None:
        small_llm.generate(PROMPT, logits_processors=[fail], max_tokens=4)

    beside_another(small_llm, run, error)


def test_stop_iteration_is_no_end_of_the_output(small_llm: LLM) -> None:
    def fail(token_ids: Any, scores: Any) -> Any:
        return next(iter(()))

    def run() -> None:
        small_llm.generate(PROMPT, logits_processors=[fail], max_tokens=4)

    beside_another(small_llm, run, RuntimeError)


@pytest.mark.parametrize("n_before", [0, 2])
def test_an_error_in_the_callback_of_an_output(small_llm: LLM, n_before: int) -> None:
    n_calls = 0

    def fail() -> None:
        nonlocal n_calls
        n_calls += 1
        if n_calls > n_before:
            raise ValueError("mine")

    def run() -> None:
        stream = small_llm.stream(PROMPT, max_tokens=N_TOKENS, ignore_eos=True)
        stream.start(on_output=fail)
        list(stream)

    beside_another(small_llm, run, ValueError)


def test_an_error_in_the_callback_at_the_end(small_llm: LLM) -> None:
    stream = small_llm.stream(PROMPT, max_tokens=4)

    def fail() -> None:
        if stream.is_over:
            raise ValueError("mine")

    stream.start(on_output=fail)
    while not stream.is_over:
        pass
    assert len(small_llm.generate(OTHER, max_tokens=4, ignore_eos=True).token_ids) == 4


def test_a_pass_that_serves_only_cancelled_requests_is_cut_short(
    small_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_streaming(monkeypatch)
    storage = HangingStorage(monkeypatch)
    options = {"ctx_size": 256, "kv_tokens": 600, "parallel": 2, "spec_type": ()}
    with specdec.load(small_target, **options) as llm:
        streams = [llm.stream(p, max_tokens=200, ignore_eos=True) for p in (PROMPT, OTHER)]
        with Stepping(llm) as steps:
            for stream in streams:
                steps.next(stream)
            storage.hang()
        storage.wait_until_reached()
        for stream in streams:
            stream.cancel_soon()
        for stream in streams:
            stream.cancel()  # returns while the read hangs
        assert storage.is_hanging
        storage.let_go()
