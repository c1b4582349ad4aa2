"""One generation at a time, nothing after the end, and figures that are one's own."""

from __future__ import annotations

import inspect
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from forced_streaming import force_streaming
from hanging_storage import HangingStorage
from interrupting import interrupted
from tiny_pair import save_model

import specdec
from specdec.api import LLM, ModelBusy, ModelClosed, ModelElsewhere
from specdec.decoding.ahead_thread import AheadThread

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"), seed=0)


@pytest.fixture(params=["streamed", "resident"])
def llm(request: Any, target: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    if request.param == "streamed":
        force_streaming(monkeypatch)
    with specdec.load(target, ctx_size=256) as loaded:
        yield loaded


class Held:
    """A logits processor that waits at its third call until it may go on."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self.reached, self.may_go_on = threading.Event(), threading.Event()
        self._n_calls = 0
        self._then = then

    def __call__(self, ids: Any, scores: Any) -> Any:
        self._n_calls += 1
        if self._n_calls == 3:
            self.reached.set()
            self._then()
            self.may_go_on.wait()
        return scores


class Generation(threading.Thread):
    """A generation in another thread; its error, if it had one."""

    def __init__(self, llm: LLM, processor: Held) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self._llm, self._processor = llm, processor
        self.start()
        processor.reached.wait()

    def run(self) -> None:
        try:
            self._llm.generate(PROMPT, max_tokens=200, logits_processors=[self._processor])
        except BaseException as error:
            self.error = error


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking with threads
def test_a_fork_is_refused_and_leaves_the_model_to_its_parent(llm: LLM) -> None:
    """The threads that read and compute are not in it: it would wait for them for ever."""
    before = llm.generate(PROMPT, max_tokens=6).token_ids
    child = os.fork()
    if child == 0:
        code = 1
        try:
            llm.generate(PROMPT, max_tokens=6)
        except ModelElsewhere:
            llm.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert llm.generate(PROMPT, max_tokens=6).token_ids == before


def test_nothing_runs_on_a_closed_model(llm: LLM) -> None:
    stream = llm.stream(PROMPT, max_tokens=50)
    unread = llm.stream(PROMPT, max_tokens=50)
    first = next(stream)
    llm.close()
    for use in (
        lambda: next(stream),
        lambda: next(unread),
        lambda: llm.stream(PROMPT),
        lambda: llm.generate(PROMPT, max_tokens=3),
    ):
        with pytest.raises(ModelClosed, match="the model is closed; load it again"):
            use()
    assert stream.result.token_ids == first.token_ids
    assert stream.result.finish_reason == "cancelled"


def test_closing_from_another_thread_ends_a_generation(llm: LLM) -> None:
    processor = Held()
    running = Generation(llm, processor)
    closing = threading.Thread(target=llm.close)
    closing.start()
    while not llm.session.is_closed:
        pass
    assert llm.target.kv_bytes > 0, "closed under a generation that computes"
    processor.may_go_on.set()
    closing.join()
    running.join()
    assert isinstance(running.error, ModelClosed)
    assert llm.target.kv_bytes == 0


def test_closing_in_the_middle_of_a_pass(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cancel the pass would go on to its last layer."""
    inside, asked, entered = threading.Event(), threading.Event(), []
    runners = llm.target._runners
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
    request_cancel = llm.target.request_cancel

    def note() -> None:
        request_cancel()
        asked.set()

    monkeypatch.setattr(llm.target, "request_cancel", note)
    processor = Held()
    processor.reached.set()
    processor.may_go_on.set()
    running = Generation(llm, processor)
    inside.wait()
    llm.close()
    running.join()
    assert isinstance(running.error, ModelClosed)
    assert len(entered) == 4


def test_closing_inside_a_generation(llm: LLM) -> None:
    """From a logits processor, say: nobody can be waited for."""
    processor = Held(then=llm.close)
    processor.may_go_on.set()
    with pytest.raises(ModelClosed):
        llm.generate(PROMPT, max_tokens=50, logits_processors=[processor])


class Left(BaseException):
    """What a signal handler raises to leave."""


@pytest.fixture
def on_alarm() -> Iterator[Callable[[Callable[..., object]], None]]:
    """Sets a handler of SIGALRM for the time of the test."""
    before = signal.getsignal(signal.SIGALRM)
    yield lambda handle: signal.signal(signal.SIGALRM, handle)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("error", [None, Left])
def test_closing_in_a_signal_handler(llm: LLM, on_alarm: Any, error: type[Left] | None) -> None:
    """The handler returns to what uses the models: they are freed behind that."""
    held = []

    def close(*_: object) -> None:
        llm.close()
        held.append(llm.target.kv_bytes)
        if error is not None:
            raise error

    on_alarm(close)
    n_committed = len(PROMPT)

    def press(ids: Any, scores: Any) -> Any:
        if len(ids[0]) > n_committed + 2 and not held:
            signal.raise_signal(signal.SIGALRM)
        return scores

    with pytest.raises(error or ModelClosed):
        llm.generate(PROMPT, max_tokens=50, logits_processors=[press])
    assert held[0] > 0
    assert llm.target.kv_bytes == 0
    with pytest.raises(ModelClosed):
        llm.generate(PROMPT)


def test_closing_in_a_signal_handler_at_any_place(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two steps of a generation, also where nothing has computed yet."""
    freed_below: list[list[str]] = []  # one model serves all places: it is not freed in fact
    monkeypatch.setattr(llm.target, "close", lambda: freed_below.append(names_of_callers()))
    before = signal.signal(signal.SIGINT, lambda *_: llm.close())
    try:
        for first in range(1, 100_000, 41):
            stream = llm.stream(PROMPT, max_tokens=3)
            folders = ("specdec", "backends", "offload")
            with interrupted(first, None, folders) as places, suppress(ModelClosed):
                list(stream)
            if not places.places:
                break
            assert freed_below, places.places
            assert not [names for names in freed_below if "chunks" in names], places.places
            freed_below.clear()
            llm.session._is_closed, llm.session._ahead = False, AheadThread()
    finally:
        signal.signal(signal.SIGINT, before)
    assert first > 1000


def names_of_callers() -> list[str]:
    frame, names = inspect.currentframe(), []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


def test_a_generation_inside_a_generation_is_refused(llm: LLM) -> None:
    expected = llm.generate(PROMPT, max_tokens=10).token_ids

    def nested(ids: Any, scores: Any) -> Any:
        llm.generate([1, 2], max_tokens=2)
        return scores

    with pytest.raises(ModelBusy, match="an LLM runs one generation at a time"):
        llm.generate(PROMPT, max_tokens=5, logits_processors=[nested])
    assert llm.generate(PROMPT, max_tokens=10).token_ids == expected


def test_a_second_thread_is_refused_and_disturbs_nothing(llm: LLM) -> None:
    processor = Held()
    running = Generation(llm, processor)
    with pytest.raises(ModelBusy, match="one generation at a time"):
        llm.generate(PROMPT, max_tokens=3)
    processor.may_go_on.set()
    running.join()
    assert running.error is None


def test_one_stream_in_two_threads_is_refused(llm: LLM) -> None:
    processor = Held()
    stream = llm.stream(PROMPT, max_tokens=20, logits_processors=[processor])
    reader = threading.Thread(target=lambda: list(stream))
    reader.start()
    processor.reached.wait()
    with pytest.raises(ModelBusy):
        next(stream)
    processor.may_go_on.set()
    reader.join()
    assert stream.result.finish_reason == "length"


class Reader(threading.Thread):
    """Reads a stream; its chunks, and its error, if it had one."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self.chunks: list[Any] = []
        self.error: BaseException | None = None
        self._stream = stream
        self.start()

    def run(self) -> None:
        try:
            self.chunks.extend(self._stream)
        except BaseException as error:
            self.error = error


@pytest.mark.parametrize("beams", [1, 3])
def test_a_stream_is_cancelled_by_another_thread(llm: LLM, beams: int) -> None:
    """Between two passes: what was there already is the result."""
    options = {"max_tokens": 40, "num_beams": beams, "cache_prompt": False}
    expected = llm.generate(PROMPT, **options).token_ids
    processor = Held()
    stream = llm.stream(PROMPT, logits_processors=[processor], **options)
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
    assert llm.generate(PROMPT, **options).token_ids == expected


def test_a_cancel_by_another_thread_ends_a_pass_that_would_not_end(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its storage hangs."""
    force_streaming(monkeypatch)
    storage = HangingStorage(monkeypatch)
    with specdec.load(target, ctx_size=256) as llm:
        expected = llm.generate(PROMPT, max_tokens=20).token_ids
        stream = llm.stream(PROMPT, max_tokens=20)
        first = next(stream)
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


def test_a_cancel_inside_of_the_generation_is_refused(llm: LLM) -> None:
    streams: list[Any] = []
    processor = Held(then=lambda: streams[0].cancel())
    processor.may_go_on.set()
    streams.append(llm.stream(PROMPT, max_tokens=20, logits_processors=[processor]))
    with pytest.raises(ModelBusy):
        list(streams[0])


def test_cancels_at_any_time(llm: LLM) -> None:
    """The reader's loop ends, never in an error, and the next generation is as ever."""
    expected = llm.generate(PROMPT, max_tokens=30).token_ids
    rng = random.Random(0)
    for _ in range(12):
        stream = llm.stream(PROMPT, max_tokens=30)
        reader = Reader(stream)
        time.sleep(rng.uniform(0.0, 0.03))
        stream.cancel()
        reader.join()
        assert reader.error is None
        assert stream.result.token_ids == expected[: len(stream.result.token_ids)]
        assert llm.generate(PROMPT, max_tokens=30).token_ids == expected


def test_a_users_error_stays_the_users(llm: LLM) -> None:
    def failing(ids: Any, scores: Any) -> Any:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        llm.generate(PROMPT, logits_processors=[failing])


def test_statistics_begin_with_the_first_chunk(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream made early does not count what another generation read meanwhile."""
    force_streaming(monkeypatch)
    with specdec.load(target, ctx_size=256, spec_type="none") as llm:
        early = llm.stream(PROMPT, max_tokens=4)
        other = llm.generate(PROMPT, max_tokens=60).stats
        assert early.result.stats.bytes_streamed == 0
        list(early)
        assert 0 < early.result.stats.bytes_streamed < other.bytes_streamed / 4
