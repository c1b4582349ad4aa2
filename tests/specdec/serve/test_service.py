"""The service without a server: admission, and time limits."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from offload.errors import SpecdecError
from offload.storage.direct_io import StorageError
from specdec.async_llm import AsyncChunk
from specdec.engine.outputs import GenerationResult
from specdec.grammar import trial
from specdec.grammar.constraint import Constraint
from specdec.metrics.stats import GenerationStats
from specdec.sampling.params import SamplingParams
from specdec.serve import service as services
from specdec.serve.admission import FAILING, READY, BodyLimiter, RequestBody
from specdec.serve.api.completions import CompletionRequest
from specdec.serve.endpoint import Endpoint
from specdec.serve.errors import ApiError
from specdec.serve.jobs import Job, completion_job
from specdec.serve.middleware import BODY
from specdec.serve.options import ServeOptions
from specdec.serve.service import Service, _Run


def body(content: bytes = b"") -> RequestBody:
    made = RequestBody(BodyLimiter(1 << 20))
    made.add(content)
    return made


def endpoint(read: Any, constraint: Constraint | None = None) -> Endpoint:
    return Endpoint(lambda content: constraint, read, lambda job, llm: None)  # type: ignore


class Gone:
    """A request whose client has disconnected."""

    def __init__(self) -> None:
        self.scope = {BODY: body()}

    async def receive(self) -> dict[str, Any]:
        return {"type": "http.disconnect"}


def test_clients_that_go_away_while_prompts_are_read_are_not_waited_for() -> None:
    """Prompts are read one after the other: those behind a long one are not read yet."""
    service = Service(ServeOptions(), ["m"], print)
    service.open(SimpleNamespace(tokenizer=None))  # never called
    may_end = threading.Event()
    asked: list[int] = []

    async def ask(number: int) -> int:
        def read(content: object) -> None:
            asked.append(number)
            may_end.wait(60)

        made = replace(endpoint(lambda content, llm: None), constraint=read)
        response = await service.answer(Gone(), made)  # type: ignore[arg-type]
        return response.status_code

    async def work() -> None:
        statuses = await asyncio.gather(*map(ask, range(3)))
        assert statuses == [499] * 3
        assert service.limiter.num_requests == 0

    try:
        asyncio.run(asyncio.wait_for(work(), 30))
    finally:
        may_end.set()
    assert asked == [0]


def test_prompts_do_not_wait_for_trials_of_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """An invalid schema takes seconds to be refused."""
    service = Service(ServeOptions(), ["m"], print)
    has_begun, may_end = threading.Event(), threading.Event()
    llm: Any = None

    def check(constraint: Constraint) -> None:
        has_begun.set()
        may_end.wait(60)

    monkeypatch.setattr(services, "check_cost", check)
    tried = endpoint(lambda content, llm: 1, Constraint("json_schema", "{}"))
    free = endpoint(lambda content, llm: 2)

    async def work() -> None:
        waiting = asyncio.create_task(service.job(body(), tried, llm))
        while not has_begun.is_set():
            await asyncio.sleep(0.01)
        assert await service.job(body(), free, llm) == 2
        may_end.set()
        assert await waiting == 1

    try:
        asyncio.run(asyncio.wait_for(work(), 30))
    finally:
        may_end.set()


def test_the_end_does_not_wait_for_trials_of_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process used to wait for their thread, one after the other."""
    service = Service(ServeOptions(), ["m"], print)
    wait = [sys.executable, "-c", "import time; time.sleep(50)"]
    monkeypatch.setattr(trial, "command_of", lambda module: wait)
    llm: Any = None
    tried = [
        endpoint(lambda content, llm: 1, Constraint("json_schema", f'{{"title": "{i}"}}'))
        for i in range(2)
    ]

    async def work() -> None:
        waiting = [asyncio.create_task(service.job(body(), item, llm)) for item in tried]
        while not trial._RUNNING:
            await asyncio.sleep(0.01)
        service.cancel_all()
        done = await asyncio.gather(*waiting, return_exceptions=True)
        assert [getattr(error, "status", None) for error in done] == [503, 503]

    asyncio.run(asyncio.wait_for(work(), 30))
    assert not trial._RUNNING


def test_a_failed_read_is_reported_until_an_answer_comes() -> None:
    service = Service(ServeOptions(), ["m"], print)
    service.limiter.state = READY
    for error, state in ((SpecdecError("no"), READY), (StorageError("gone"), FAILING)):
        with pytest.raises(ApiError, match="the model failed"), service.translated():
            raise error
        assert service.limiter.state == state
        assert f'specdec_state{{state="{state}"}} 1.0' in service.metrics.text().decode()
    service.limiter.acquire().release()
    with service.translated():
        pass
    assert service.limiter.state == READY


def test_a_body_is_dropped_once_it_is_read() -> None:
    """Parsed, 32 of a megabyte each used to take 350 MiB until their answers ended."""
    service = Service(ServeOptions(), ["m"], print)
    bodies = BodyLimiter(100)
    pinned = RequestBody(bodies)
    pinned.add(b"x" * 60)
    llm: Any = None

    async def work() -> None:
        read = endpoint(lambda content, llm: bytes(content))
        assert await service.job(pinned, read, llm) == b"x" * 60

    asyncio.run(asyncio.wait_for(work(), 30))
    assert (bodies.num_bytes, len(pinned.content)) == (0, 0)


def test_a_clients_body_is_freed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to stay in the thread's queue, uncounted: behind a schema of seconds, as much as
    anybody sends in that time."""
    service = Service(ServeOptions(), ["m"], print)
    may_end, made = threading.Event(), []
    llm: Any = None
    monkeypatch.setattr(services, "check_cost", lambda constraint: may_end.wait(60))

    def read(content: bytearray) -> Constraint:
        constraint = Constraint("json_schema", "{}")
        made.append(weakref.ref(constraint))
        return constraint

    tried = replace(endpoint(lambda content, llm: 1), constraint=read)

    async def work() -> None:
        first = asyncio.create_task(service.job(body(), tried, llm))
        second = asyncio.create_task(service.job(body(), tried, llm))
        while not service._trials._work_queue.qsize():
            await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.wait([second])
        del second
        gc.collect()
        assert [item() is not None for item in made] == [True, False]
        may_end.set()
        assert await first == 1

    try:
        asyncio.run(asyncio.wait_for(work(), 30))
    finally:
        may_end.set()


class Ready:
    """An output whose next chunk is always ready, as for a client that reads slowly."""

    is_cancelled = False

    def __aiter__(self) -> Ready:
        return self

    async def __anext__(self) -> AsyncChunk:
        return AsyncChunk("x", (1,))


def test_a_client_that_reads_slowly_has_no_more_time_than_others() -> None:
    """The time used to be checked only without a ready chunk, which for such a client is never."""
    service = Service(ServeOptions(request_timeout=0.01), ["m"], print)
    service.open(SimpleNamespace(tokenizer=None))  # never called

    async def work() -> None:
        run = _Run(service, Gone())  # type: ignore[arg-type]
        with pytest.raises(asyncio.TimeoutError):
            async for _ in run._chunks([Ready()]):
                pass

    asyncio.run(asyncio.wait_for(work(), 30))


def test_a_completion_that_does_not_say_how_long_keeps_to_the_servers_limit() -> None:
    """It used to be refused for 16 tokens, OpenAI's default, which it had not requested."""
    tokenizer = SimpleNamespace(encode=lambda text: [1], n_tokens=9)
    llm: Any = SimpleNamespace(tokenizer=tokenizer, max_context=64)
    for limit, expected in ((8, 8), (100, 16)):
        limits = ServeOptions(max_output_tokens=limit)
        job = completion_job(CompletionRequest(prompt="x"), llm, limits)
        assert job.params.max_tokens == expected


@pytest.mark.parametrize(
    ("seed", "expected"), [(7, 7), (None, None), (-1, None), (-5, 2**64 - 5), (2**64 + 3, 3)]
)
def test_a_seed_of_minus_one_is_none(seed: int | None, expected: int | None) -> None:
    """llama.cpp's clients send -1: all of them used to get the same output."""
    tokenizer = SimpleNamespace(encode=lambda text: [1], n_tokens=9)
    llm: Any = SimpleNamespace(tokenizer=tokenizer, max_context=64)
    job = completion_job(CompletionRequest(prompt="x", seed=seed), llm, ServeOptions())
    assert job.params.seed == expected


class Begun(Ready):
    has_begun = True
    result = GenerationResult((), GenerationStats(passes=3))


class NotBegun(Ready):
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
    service = Service(ServeOptions(), ["m"], print)
    service.open(SimpleNamespace(tokenizer=None))  # never called
    job = Job(([1], [2]), SamplingParams(), tells_timings=True)

    async def work() -> None:
        run = _Run(service, Gone())  # type: ignore[arg-type]
        run._streams = [Begun(), NotBegun()]  # type: ignore[list-item]
        event: Any = await run._events(job).__anext__()
        assert event.usage.timings["passes"] == 3

    asyncio.run(asyncio.wait_for(work(), 30))
