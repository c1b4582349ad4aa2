"""Calls that wait between two steps are served, though steps continue."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from stepping import Stepping
from tiny_pair import save_model

import specdec
from specdec.api import LLM
from specdec.sampling.params import SamplingParams

N_TOKENS = 60
LONG = SamplingParams(max_tokens=N_TOKENS, ignore_eos=True)
SOON_SECONDS = 5.0


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    target = save_model(tmp_path_factory.mktemp("target"), seed=0)
    with specdec.load(target, ctx_size=256, kv_tokens=512, num_draft_tokens=0) as loaded:
        yield loaded


def sequences_of_passes(llm: LLM, patch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of sequences in each pass from now on."""
    actual: list[int] = []
    run = llm.target.forward

    def noted(batch: Any) -> Any:
        actual.append(len(batch))
        return run(batch)

    patch.setattr(llm.target, "forward", noted)
    return actual


class Meanwhile:
    """A logits processor that makes another thread act from its fifth call on."""

    def __init__(self, action: Any) -> None:
        self.n_calls = 0
        self.was_done_before_the_end = False
        self._done = threading.Event()
        self._action = action
        self._thread = threading.Thread(target=self._act)

    def _act(self) -> None:
        self._action()
        self._done.set()

    def __call__(self, ids: Any, scores: Any) -> Any:
        self.n_calls += 1
        if self.n_calls == 5:
            self._thread.start()
            self._thread.join(0.05)  # it waits for the end of this step
        if self.n_calls == N_TOKENS - 5:
            self.was_done_before_the_end = self._done.wait(SOON_SECONDS)
        return scores

    def read(self, llm: LLM) -> None:
        llm.generate([5, 6, 7], LONG, logits_processors=[self])
        self._thread.join()


def test_a_cancel_returns_with_the_step(llm: LLM) -> None:
    other = llm.stream([80, 81], LONG)
    next(other)
    meanwhile = Meanwhile(other.cancel)
    meanwhile.read(llm)
    assert meanwhile.was_done_before_the_end
    assert other.is_over


def test_a_cancel_of_what_never_began_returns(llm: LLM) -> None:
    other = llm.stream([80, 81], LONG)
    meanwhile = Meanwhile(other.cancel)
    meanwhile.read(llm)
    assert meanwhile.was_done_before_the_end
    assert other.is_over


def test_calls_between_steps_come_next(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm.generate([80, 81], max_tokens=1)  # so that there is something to drop
    meanwhile = Meanwhile(llm.session.forget_prompt)
    steps: list[int] = []
    clear = llm.session.models.prefix_cache.clear

    def noted() -> None:
        steps.append(meanwhile.n_calls)
        clear()

    monkeypatch.setattr(llm.session.models.prefix_cache, "clear", noted)
    meanwhile.read(llm)
    assert meanwhile.was_done_before_the_end
    assert steps[0] == 5


def test_an_unreferenced_stream_takes_part_in_no_more_steps(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Stepping(llm) as steps:
        other = llm.stream([80, 81], LONG)
        steps.next(other)
        num_seqs = sequences_of_passes(llm, monkeypatch)
        del other
        gc.collect()
        steps.rest(llm.stream([5, 6, 7], max_tokens=3, ignore_eos=True))
    assert num_seqs == [1, 1, 1]
