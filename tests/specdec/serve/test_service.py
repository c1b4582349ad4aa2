"""The service without a server, on an engine that the test plays: admission, and time limits."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from engines import PlayedEngine, model_starter, router_of_one

from specdec.async_llm import AsyncChunk
from specdec.checks import ConfigError
from specdec.engine.sequences.outputs import GenerationResult
from specdec.grammar import trial
from specdec.grammar.constraint import Constraint
from specdec.metrics.stats import GenerationStats
from specdec.run_options import RunOptions
from specdec.sampling.params import UNLIMITED_TOKENS, SamplingParams
from specdec.serve import answering
from specdec.serve.admission import BodyLimiter, RequestBody
from specdec.serve.answering import RunningRequest, answer_to
from specdec.serve.api.completions import CompletionRequest
from specdec.serve.api.openai_answers import CompletionAnswer
from specdec.serve.endpoint import Endpoint, Reading
from specdec.serve.errors import ApiError
from specdec.serve.events import Step
from specdec.serve.jobs import Job, JobHead, completion_job
from specdec.serve.middleware import BODY
from specdec.serve.options import ServeOptions
from specdec.serve.process import host as hosts
from specdec.serve.process.client import EngineRequest, StorageFailure
from specdec.serve.process.generation import Generation
from specdec.serve.process.host import EngineHost
from specdec.serve.process.messages import WINDOW, Ended, Failed, Output, pickled
from specdec.serve.process.translation import Log
from specdec.serve.router.router import ModelRouter
from specdec.serve.router.runner import ModelRunner
from specdec.serve.router.share import ModelOptions, Share
from specdec.serve.router.states import FAILING, READY
from specdec.serve.service import Service


def body(content: bytes = b"") -> RequestBody:
    made = RequestBody(BodyLimiter(1 << 20))
    made.add(content)
    return made


def endpoint(read: Any) -> Endpoint:
    return Endpoint(read, lambda name, head, repeated: CompletionAnswer(name, head))


def opened(limits: ServeOptions | None = None) -> Service:
    """Return a service whose engine takes requests and does nothing."""
    return Service(limits or ServeOptions(), router_of_one())


def host() -> EngineHost:
    socket: Any = SimpleNamespace(send=lambda message: None)
    return EngineHost(socket, ServeOptions(), Log(print))


class Client:
    """A request; its client disconnects at once, or never."""

    def __init__(self, *, is_gone: bool = False) -> None:
        self.scope, self._is_gone = {BODY: body(b"{}")}, is_gone

    async def receive(self) -> dict[str, Any]:
        if not self._is_gone:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}


def test_clients_that_go_away_while_prompts_are_read_are_not_waited_for() -> None:
    """Bodies are read one after the other: those behind a long one are not read yet."""
    service = opened()
    may_end = threading.Event()
    asked: list[int] = []

    async def ask(number: int) -> int:
        def read(content: object) -> Any:
            asked.append(number)
            may_end.wait(60)
            return Reading(None)

        client: Any = Client(is_gone=True)
        return (await answer_to(service, client, endpoint(read))).status_code

    async def work() -> None:
        statuses = await asyncio.gather(*map(ask, range(3)))
        assert statuses == [499] * 3
        assert service.limiter.num_requests == 0

    try:
        asyncio.run(asyncio.wait_for(work(), 30))
    finally:
        may_end.set()
    assert asked == [0]


def completion(**more: Any) -> bytes:
    return pickled(CompletionRequest(prompt="x", **more))


LLM: Any = SimpleNamespace(
    tokenizer=SimpleNamespace(encode=lambda text, **options: [1], n_tokens=9), max_context=64
)


def test_prompts_do_not_wait_for_trials_of_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """An invalid schema takes seconds to be refused."""
    made = host()
    has_begun, may_end = threading.Event(), threading.Event()

    def check(constraint: Constraint) -> None:
        has_begun.set()
        may_end.wait(60)

    monkeypatch.setattr(hosts, "check_cost", check)

    async def work() -> None:
        waiting = asyncio.create_task(made.job(completion(json_schema={"title": "a"}), LLM))
        while not has_begun.is_set():
            await asyncio.sleep(0.01)
        assert (await made.job(completion(), LLM)).params.constraint is None
        may_end.set()
        assert (await waiting).params.constraint is not None

    try:
        asyncio.run(asyncio.wait_for(work(), 30))
    finally:
        may_end.set()


def test_the_end_does_not_wait_for_trials_of_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process used to wait for their thread, one after the other."""
    made = host()
    wait = [sys.executable, "-c", "import time; time.sleep(50)"]
    monkeypatch.setattr(trial, "command_of", lambda module: wait)

    async def work() -> None:
        tried = [completion(json_schema={"title": f"{i}"}) for i in range(2)]
        waiting = [asyncio.create_task(made.job(form, LLM)) for form in tried]
        while not trial._RUNNING:
            await asyncio.sleep(0.01)
        made.end_trials()
        done = await asyncio.gather(*waiting, return_exceptions=True)
        assert [getattr(error, "status", None) for error in done] == [503, 503]

    asyncio.run(asyncio.wait_for(work(), 30))
    assert not trial._RUNNING


def test_a_failed_read_is_reported_until_an_answer_comes() -> None:
    service = opened()
    runner = service.router.only
    for error, state in ((ApiError, READY), (StorageFailure, FAILING)):
        failed = pytest.raises(ApiError, match="the model failed")
        with failed, service.translated(lambda: runner):
            raise error(500, "the model failed")
        assert service.state == state
        assert f'specdec_state{{state="{state}"}} 1.0' in service.metrics.text().decode()
    service.limiter.acquire().release()
    with service.translated(lambda: runner):
        pass
    assert service.state == READY


def test_a_body_is_dropped_once_the_engine_has_read_it() -> None:
    """Parsed, 32 of a megabyte each used to take 350 MiB until their answers ended."""
    service = opened()

    async def work() -> None:
        client: Any = Client()
        run = RunningRequest(service, client)
        read = await run._read(endpoint(lambda content: Reading(None, "repeated")))
        beginning = asyncio.create_task(run._begin(*read))
        while not service._requests:
            await asyncio.sleep(0.01)
        assert client.scope[BODY].content == b"{}"
        (asked,) = service._requests
        asked.put(JobHead())
        assert (await beginning, read[0].reading.repeated) == (JobHead(), "repeated")
        assert not client.scope[BODY].content

    asyncio.run(asyncio.wait_for(work(), 30))


def test_a_clients_form_is_freed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to stay in the thread's queue, uncounted: behind a schema of seconds, as much as
    anybody sends in that time."""
    host_, may_end, made = host(), threading.Event(), []
    monkeypatch.setattr(hosts, "check_cost", lambda constraint: may_end.wait(60))
    constrain = hosts.request_constraint

    def constraint_of(form: Any) -> Constraint | None:
        constraint = constrain(form)
        made.append(weakref.ref(constraint))
        return constraint

    monkeypatch.setattr(hosts, "request_constraint", constraint_of)

    async def work() -> None:
        first, second = (
            asyncio.create_task(host_.job(completion(json_schema={"title": f"{i}"}), LLM))
            for i in range(2)
        )
        while not host_._trials._work_queue.qsize():
            await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.wait([second])
        del second
        gc.collect()
        assert [item() is not None for item in made] == [True, False]
        may_end.set()
        await first

    try:
        asyncio.run(asyncio.wait_for(work(), 30))
    finally:
        may_end.set()


# --- silence ----------------------------------------------------------------------------------


async def frames(service: Service, feed: Any) -> list[bytes]:
    """Return what a stream sends, of an engine that `feed` plays on its request."""
    run = RunningRequest(service, Client())  # type: ignore[arg-type]
    asked = run._asked = EngineRequest(lambda: None, lambda num: None)
    feeding = asyncio.create_task(feed(asked))
    sent = [data async for data in run._event_bytes(CompletionAnswer("m", JobHead()))]
    feeding.cancel()
    return sent


def test_a_request_may_take_longer_than_its_silence() -> None:
    service = opened(ServeOptions(request_timeout=0.2))

    async def feed(asked: EngineRequest) -> None:
        for _ in range(8):  # 0.4 s in all
            asked.put(None)
            await asyncio.sleep(0.05)

    *_, error, end = asyncio.run(frames(service, feed))
    assert b"the request made no progress for 0.2 s" in error
    assert end == b"data: [DONE]\n\n"


def test_a_silent_engine_ends_a_request() -> None:
    service = opened(ServeOptions(request_timeout=0.1))

    async def work() -> None:
        asked = asyncio.create_task(
            answer_to(service, Client(), endpoint(lambda content: Reading(None)))  # type: ignore
        )
        with pytest.raises(ApiError) as error:
            await asked
        assert (error.value.status, error.value.headers["X-Should-Retry"]) == (408, "false")
        (request,) = service._requests
        assert request.is_cancelled
        assert service.limiter.num_requests == 1, "until the engine has ended it"
        request.end()
        await asyncio.sleep(0)
        assert service.limiter.num_requests == 0

    asyncio.run(asyncio.wait_for(work(), 30))


def test_a_ping_comes_where_no_byte_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without text used to count as bytes: a proxy cuts such a stream."""
    monkeypatch.setattr(answering, "PING_SECONDS", 0.1)

    async def feed(asked: EngineRequest) -> None:
        for _ in range(10):
            asked.put(Step(0, []))  # text that is withheld
            await asyncio.sleep(0.03)
        asked.put(ApiError(500, "the end"))

    sent = asyncio.run(frames(opened(), feed))
    assert 2 <= sent.count(CompletionAnswer.ping) <= 4


@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_stream_whose_model_is_loaded_first_gets_pings(
    monkeypatch: pytest.MonkeyPatch, is_loaded: bool
) -> None:
    monkeypatch.setattr(answering, "PING_SECONDS", 0.05)

    def loads(engine: PlayedEngine) -> int:
        engine.is_killed.wait(0.3)
        if not is_loaded:
            return 2
        engine.load()
        request = engine.socket.receive()
        engine.socket.send(Output(request.id, JobHead(streams_output=True)))
        engine.socket.send(Failed(request.id, ApiError(500, "the end")))
        engine.socket.send(Ended(request.id))
        return 0

    options = ModelOptions(("m",), RunOptions("m"), Share(1), on_startup=False)
    router = ModelRouter([ModelRunner(options, [model_starter(loads)], print, 4.0)], Share(1))
    service = Service(ServeOptions(), router)

    async def work() -> list[bytes]:
        stream = endpoint(lambda content: Reading(None, model="m", streams=True))
        response: Any = await answer_to(service, Client(), stream)  # type: ignore[arg-type]
        assert (response.status_code, response.media_type) == (200, "text/event-stream")
        sent = [data async for data in response.body_iterator]
        response._on_end()
        while service.limiter.num_requests:
            await asyncio.sleep(0.01)
        assert router.runners[0].is_idle
        await router.end()
        return sent

    *pings, error, end = asyncio.run(asyncio.wait_for(work(), 30))
    assert set(pings) == {CompletionAnswer.ping}
    assert len(pings) >= 2
    assert (b"the end" if is_loaded else b"model_load_failed") in error
    assert end == CompletionAnswer.closing


def test_a_client_that_reads_slowly_holds_few_values_in_the_server() -> None:
    """The engine's output waits in the engine, where it takes few bytes."""
    sent: list[Any] = []
    socket: Any = SimpleNamespace(send=sent.append)
    nothing: Any = None
    generation = Generation(1, nothing, socket, nothing, nothing)

    async def work() -> None:
        async def send() -> None:
            for i in range(3 * WINDOW):
                await generation._capacity()
                generation._send(i)

        sending = asyncio.create_task(send())
        await asyncio.sleep(0.01)
        assert len(sent) == WINDOW
        generation.take(WINDOW // 4)
        await asyncio.sleep(0.01)
        assert len(sent) == WINDOW + WINDOW // 4
        sending.cancel()

    asyncio.run(work())


def test_a_completion_that_does_not_say_how_long_keeps_to_the_servers_limit() -> None:
    """It used to be refused for 16 tokens, OpenAI's default, which it had not requested."""
    tokenizer = SimpleNamespace(encode=lambda text: [1], n_tokens=9)
    llm: Any = SimpleNamespace(tokenizer=tokenizer, max_context=64)
    for limit, expected in ((8, 8), (100, 16), (-1, 16)):
        limits = ServeOptions(max_output_tokens=limit)
        job = completion_job(CompletionRequest(prompt="x"), llm, limits)
        assert job.params.max_tokens == expected
    assert ServeOptions(max_output_tokens=-1).output_limit == UNLIMITED_TOKENS
    with pytest.raises(ConfigError, match="max_output_tokens is 0, must be positive, or -1"):
        ServeOptions(max_output_tokens=0)


@pytest.mark.parametrize(
    ("seed", "expected"), [(7, 7), (None, None), (-1, None), (-5, 2**64 - 5), (2**64 + 3, 3)]
)
def test_a_seed_of_minus_one_is_none(seed: int | None, expected: int | None) -> None:
    """llama.cpp's clients send -1: all of them used to get the same output."""
    tokenizer = SimpleNamespace(encode=lambda text: [1], n_tokens=9)
    llm: Any = SimpleNamespace(tokenizer=tokenizer, max_context=64)
    job = completion_job(CompletionRequest(prompt="x", seed=seed), llm, ServeOptions())
    assert job.params.seed == expected


class Begun:
    """An output whose next chunk is ready."""

    is_cancelled, has_begun, prompt_logprobs = False, True, None
    result = GenerationResult((), GenerationStats(passes=3))

    def __aiter__(self) -> Begun:
        return self

    async def __anext__(self) -> AsyncChunk:
        return AsyncChunk("x", (1,))


class NotBegun(Begun):
    """An output that waits behind another one of its request."""

    has_begun = False

    @property
    def result(self) -> GenerationResult:
        raise AssertionError("there is none yet")

    async def __anext__(self) -> AsyncChunk:
        await asyncio.Event().wait()
        raise StopAsyncIteration


def test_running_metrics_are_of_the_sequences_that_have_begun() -> None:
    """The stream used to end with a 500 if another output had not begun."""
    job = Job(([1], [2]), SamplingParams(), tells_timings=True)
    nothing: Any = None

    async def work() -> None:
        generation = Generation(1, nothing, nothing, nothing, nothing)
        generation._streams = [Begun(), NotBegun()]  # type: ignore[list-item]
        event: Any = await generation._events(job, LLM).__anext__()
        assert event.usage.timings["passes"] == 3

    asyncio.run(asyncio.wait_for(work(), 30))
