"""A model is closed, in any thread and at any time, and nothing runs on it afterwards."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from interrupting import interrupted
from paused_generation import PROMPT, Generation, Pinned
from stepping import Stepping

import specdec
from offload.experts.readers import ExpertReaders
from offload.storage.direct_io import StorageError
from specdec.api import LLM, ModelClosed, ModelElsewhere
from specdec.engine.stream import GenerationStream


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # for forking with threads
def test_a_fork_is_refused_and_leaves_the_model_to_its_parent(small_llm: LLM) -> None:
    """The fork lacks the reading and computing threads: it would wait for them forever."""
    before = small_llm.generate(PROMPT, max_tokens=6).token_ids
    child = os.fork()
    if child == 0:
        code = 1
        try:
            small_llm.generate(PROMPT, max_tokens=6)
        except ModelElsewhere:
            small_llm.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert small_llm.generate(PROMPT, max_tokens=6).token_ids == before


def test_nothing_runs_on_a_closed_model(small_llm: LLM) -> None:
    stream = small_llm.stream(PROMPT, max_tokens=50)
    unread = small_llm.stream(PROMPT, max_tokens=50)
    with Stepping(small_llm) as steps:
        first = steps.next(stream)
        steps.close(small_llm)
    for use in (
        lambda: next(stream),
        lambda: next(unread),
        lambda: small_llm.stream(PROMPT),
        lambda: small_llm.generate(PROMPT, max_tokens=3),
    ):
        with pytest.raises(ModelClosed, match="the model is closed; load it again"):
            use()
    assert stream.result.token_ids == first.token_ids
    assert stream.result.finish_reason == "cancelled"


def test_closing_from_another_thread_ends_a_generation(small_llm: LLM) -> None:
    processor = Pinned()
    running = Generation(small_llm, processor)
    closing = threading.Thread(target=small_llm.close)
    closing.start()
    while not small_llm.session.engine.is_closing:
        pass
    assert small_llm.target.kv_bytes > 0, "closed under a generation that computes"
    processor.may_go_on.set()
    closing.join()
    running.join()
    assert isinstance(running.error, ModelClosed)
    assert small_llm.target.kv_bytes == 0


def test_closing_in_the_middle_of_a_pass(small_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cancel the pass would go on to its last layer."""
    inside, asked, entered = threading.Event(), threading.Event(), []
    runners = small_llm.target._runner.layers
    for index, runner in enumerate(runners):

        def forward(
            *args: Any, _forward: Any = runner._forward, _index: int = index, **kwargs: Any
        ) -> Any:
            entered.append(_index)
            if len(entered) == 4:  # the first layer of the second pass
                inside.set()
                asked.wait()
            return _forward(*args, **kwargs)

        runner._forward = forward
    request_cancel = small_llm.target.request_cancel

    def note() -> None:
        request_cancel()
        asked.set()

    monkeypatch.setattr(small_llm.target, "request_cancel", note)
    processor = Pinned()
    processor.reached.set()
    processor.may_go_on.set()
    running = Generation(small_llm, processor)
    inside.wait()
    small_llm.close()
    running.join()
    assert isinstance(running.error, ModelClosed)
    assert len(entered) == 4


def test_closing_inside_a_generation(small_llm: LLM) -> None:
    """A logits processor closes the model: nobody can be waited for."""
    processor = Pinned(then=small_llm.close)
    processor.may_go_on.set()
    with pytest.raises(ModelClosed):
        small_llm.generate(PROMPT, max_tokens=50, logits_processors=[processor])


@pytest.mark.slow
def test_a_failed_generation_is_freed(small_llm: LLM) -> None:
    """The error's traceback leads to the stream, and so to the model."""

    def fail(ids: Any, scores: Any) -> Any:
        raise ValueError("no")

    def generate() -> weakref.ref[GenerationStream]:
        stream = small_llm.stream(PROMPT, max_tokens=5, logits_processors=[fail])
        with pytest.raises(ValueError, match="no"):
            next(stream)
        return weakref.ref(stream)

    left = generate()
    gc.collect()
    assert left() is None


def test_a_read_that_failed_keeps_no_memory_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = specdec.load("pair:moe", memory_budget="1GiB", ctx_size=64, parallel=1)
    memory = llm.target._weights._experts._memory
    read, n_left = ExpertReaders._read, iter(range(20))

    def lose(*args: Any) -> StorageError | None:
        return StorageError("the disk is gone") if next(n_left, None) is None else read(*args)

    monkeypatch.setattr(ExpertReaders, "_read", lose)
    gc.collect()
    gc.disable()  # the collector would find them sooner or later
    try:
        with pytest.raises(StorageError, match="the disk is gone"):
            llm.generate("def area(", max_tokens=4)
        llm.close()
        assert memory._map.closed
    finally:
        gc.enable()


class Left(BaseException):
    """Raised by a signal handler to leave."""


@pytest.fixture
def on_alarm() -> Iterator[Callable[[Callable[..., object]], None]]:
    """Install a handler of SIGALRM for the time of the test."""
    before = signal.getsignal(signal.SIGALRM)
    yield lambda handle: signal.signal(signal.SIGALRM, handle)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("error", [None, Left])
def test_closing_in_a_signal_handler(
    small_llm: LLM, on_alarm: Any, error: type[Left] | None
) -> None:
    """The main thread waits for a chunk while another one computes."""
    pinned: list[int] = []
    main = threading.main_thread().ident or 0

    def close(*_: object) -> None:
        small_llm.close()
        pinned.append(small_llm.target.kv_bytes)
        if error is not None:
            raise error

    def is_closing() -> None:
        while not small_llm.session.engine.is_closing:
            pass

    on_alarm(close)
    n_committed = len(PROMPT)

    def press(ids: Any, scores: Any) -> Any:
        if len(ids[0]) > n_committed + 2 and not pinned:
            signal.pthread_kill(main, signal.SIGALRM)
            is_closing()
        return scores

    with pytest.raises(error or ModelClosed):
        small_llm.generate(PROMPT, max_tokens=50, logits_processors=[press])
    assert pinned == [0]
    with pytest.raises(ModelClosed):
        small_llm.generate(PROMPT)


@pytest.mark.slow
def test_closing_in_a_signal_handler_at_any_place(small_target: Path) -> None:
    """The signal comes between any two steps of the caller, also while it waits for nothing yet."""
    n_places = 0
    for first in range(1, 100_000, 41):
        llm = specdec.load(small_target, ctx_size=256, spec_type="none")
        before = signal.signal(signal.SIGINT, lambda *_, llm=llm: llm.close())
        try:
            stream = llm.stream(PROMPT, max_tokens=3)
            with interrupted(first, None, ("specdec", "offload")) as places, suppress(ModelClosed):
                list(stream)
        finally:
            signal.signal(signal.SIGINT, before)
        n_places += len(places.places)
        assert llm.session.engine.is_closing == bool(places.places)
        assert (llm.target.kv_bytes == 0) == bool(places.places)
        llm.close()
        if not places.places:
            break
    assert n_places > 1
