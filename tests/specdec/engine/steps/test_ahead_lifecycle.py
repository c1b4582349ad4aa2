"""Both models at work: any end of one ends the other, and the next generation is unaffected."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forced_streaming import force_streaming
from hanging_storage import HangingStorage
from tiny_pair import save_model

import specdec
from backends.contract.backend import BackendError
from offload.errors import SpecdecError
from specdec.api import LLM, ModelClosed
from specdec.sampling.params import SamplingParams

PROMPT = "def add(a, b):\n    return a"
PARAMS = SamplingParams(max_tokens=10, temperature=0.7, seed=3)
SIZE = {
    "ctx_size": 128,
    "num_draft_tokens": 4,
    "draft_ahead": "on",
    "spec_type": "draft,ngram",
    "threads": 1,  # two thread pools that wait for each other's cores are slow
}
_GGUF = pytest.mark.gguf
MIXES = [
    pytest.param(("pair:target", "pair:draft"), id="torch"),
    pytest.param(("pair:target", "pair:draft.gguf"), id="torch-gguf", marks=_GGUF),
    pytest.param(("pair:target.gguf", "pair:draft"), id="gguf-torch", marks=_GGUF),
    pytest.param(("pair:target.gguf", "pair:draft.gguf"), id="gguf", marks=_GGUF),
]


@pytest.fixture(scope="module", params=MIXES)
def llm(request: Any) -> Iterator[LLM]:
    with specdec.load(*request.param, **SIZE) as loaded:
        yield loaded
    assert not ahead_threads()


def ahead_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("specdec-draft")]


def is_ahead() -> bool:
    return threading.current_thread().name.startswith("specdec-draft")


class Draft:
    """The draft model's `run`, modified in parallel drafting."""

    def __init__(self, llm: LLM, patch: pytest.MonkeyPatch, then: Callable[[], None]) -> None:
        assert llm.draft is not None
        self.began, self.cancelled = threading.Event(), threading.Event()
        self.is_running = False
        run, request_cancel = llm.draft.forward, llm.draft.request_cancel

        def changed(*arguments: Any) -> Any:
            if is_ahead():
                self.is_running = True
                self.began.set()
                try:
                    then()
                finally:
                    self.is_running = False
            return run(*arguments)

        def cancel() -> None:
            request_cancel()
            self.cancelled.set()

        patch.setattr(llm.draft, "forward", changed)
        patch.setattr(llm.draft, "request_cancel", cancel)


def passes_wait(llm: LLM, patch: pytest.MonkeyPatch, draft: Draft) -> None:
    """Delay each pass until parallel drafting has begun: passes of tiny models end too soon."""
    run = llm.target.forward

    def when_drafting(batch: Any) -> Any:
        if batch[0].parents is not None:  # no prompt
            draft.began.wait()
        return run(batch)

    patch.setattr(llm.target, "forward", when_drafting)


def until_cancelled(draft: list[Draft]) -> None:
    draft[0].cancelled.wait()
    raise BackendError("the pass was cancelled")


_EXPECTED: dict[int, tuple[int, ...]] = {}


def expected(llm: LLM) -> tuple[int, ...]:
    """The target's own output."""
    if id(llm) not in _EXPECTED:
        _EXPECTED[id(llm)] = llm.generate(PROMPT, PARAMS, speculative=False).token_ids
    return _EXPECTED[id(llm)]


@pytest.mark.slow_except(1)
def test_both_work_at_once_and_the_output_is_plain_decodings(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        passes_wait(llm, patch, Draft(llm, patch, lambda: None))
        result = llm.generate(PROMPT, PARAMS)
    assert result.token_ids == expected(llm)
    stats = result.stats
    assert 0 < stats.draft_ahead_hits + stats.draft_ahead_misses <= stats.passes
    assert 0.0 < stats.overlapped_draft_seconds <= min(stats.draft_seconds, stats.pass_seconds)


@pytest.mark.slow_except(2)
def test_an_error_of_the_draft(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise SpecdecError("the draft's disk is gone")

    with monkeypatch.context() as patch:
        passes_wait(llm, patch, Draft(llm, patch, fail))
        with pytest.raises(SpecdecError, match="the draft's disk is gone"):
            llm.generate(PROMPT, PARAMS)
    assert llm.generate(PROMPT, PARAMS).token_ids == expected(llm)


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_an_end_of_the_pass(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    """The draft is in a level that lasts until it is cancelled."""
    with monkeypatch.context() as patch:
        drafts: list[Draft] = []
        drafts.append(Draft(llm, patch, lambda: until_cancelled(drafts)))

        run = llm.target.forward

        def fail(batch: Any) -> Any:
            if batch[0].parents is None:
                return run(batch)
            drafts[0].began.wait()
            raise kind("of the pass")

        patch.setattr(llm.target, "forward", fail)
        with pytest.raises(kind, match="of the pass"):
            llm.generate(PROMPT, PARAMS)
        assert drafts[0].cancelled.is_set()
        assert not drafts[0].is_running
    assert llm.generate(PROMPT, PARAMS).token_ids == expected(llm)


def test_a_stream_that_is_cancelled_leaves_nobody_at_work(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        draft = Draft(llm, patch, lambda: None)
        passes_wait(llm, patch, draft)
        stream = llm.stream(PROMPT, PARAMS)
        for _ in range(3):
            next(stream)
            assert not draft.is_running
        stream.cancel()
        assert draft.began.is_set()
    assert llm.generate(PROMPT, PARAMS).token_ids == expected(llm)


def test_closing_while_both_are_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_model(tmp_path, seed=0)
    n_before = len(ahead_threads())
    with specdec.load(model, model, **SIZE) as llm:
        drafts: list[Draft] = []
        drafts.append(Draft(llm, monkeypatch, lambda: until_cancelled(drafts)))
        cancelled = threading.Event()

        run = llm.target.forward

        def until_reported(batch: Any) -> Any:
            if batch[0].parents is None:
                return run(batch)
            cancelled.wait()
            raise BackendError("the pass was cancelled")

        monkeypatch.setattr(llm.target, "forward", until_reported)
        monkeypatch.setattr(llm.target, "request_cancel", cancelled.set)
        errors: list[BaseException] = []

        def generate() -> None:
            try:
                llm.generate(PROMPT, PARAMS)
            except BaseException as error:
                errors.append(error)

        running = threading.Thread(target=generate)
        running.start()
        drafts[0].began.wait()
        llm.close()
        running.join()
        assert [type(error) for error in errors] == [ModelClosed]
        assert not drafts[0].is_running
        assert len(ahead_threads()) == n_before
        assert llm.draft is not None
        assert llm.draft.kv_bytes == llm.target.kv_bytes == 0


@pytest.fixture
def hanging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[LLM, HangingStorage]]:
    """A model that drafts for itself from a second copy; both stream all of their layers."""
    model = save_model(tmp_path, seed=0, num_hidden_layers=4)
    force_streaming(monkeypatch)
    storage = HangingStorage(monkeypatch)
    with specdec.load(model, model, **SIZE) as llm:
        yield llm, storage
        storage.let_go()


def test_an_error_of_the_draft_while_the_pass_waits_for_storage_that_hangs(
    hanging: tuple[LLM, HangingStorage], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, storage = hanging
    plain = llm.generate(PROMPT, PARAMS, speculative=False).token_ids
    has_begun = threading.Event()

    def fail() -> None:
        storage.hang()
        has_begun.set()
        storage.wait_until_reached()
        raise SpecdecError("the draft's disk is gone")

    with monkeypatch.context() as patch:
        Draft(llm, patch, fail)
        run = llm.target.forward

        def when_it_hangs(batch: Any) -> Any:
            if batch[0].parents is not None:  # no prompt
                has_begun.wait()
            return run(batch)

        patch.setattr(llm.target, "forward", when_it_hangs)
        with pytest.raises(SpecdecError, match="the draft's disk is gone"):
            llm.generate(PROMPT, PARAMS)
    assert storage.is_hanging
    storage.let_go()
    assert llm.generate(PROMPT, PARAMS).token_ids == plain


def test_closing_while_the_storage_hangs(hanging: tuple[LLM, HangingStorage]) -> None:
    llm, storage = hanging
    errors: list[BaseException] = []

    def generate() -> None:
        try:
            llm.generate(PROMPT, PARAMS)
        except BaseException as error:
            errors.append(error)

    storage.hang()
    running, closing = threading.Thread(target=generate), threading.Thread(target=llm.close)
    running.start()
    storage.wait_until_reached()
    closing.start()
    running.join()
    assert [type(error) for error in errors] == [ModelClosed]
    assert storage.is_hanging
    storage.let_go()  # closing waits some seconds for readers, which use the memory
    closing.join()
