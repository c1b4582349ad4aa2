"""The service behind the routes: one LLM, the requests that it admits, and their answers."""

from __future__ import annotations

import asyncio
import time
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from offload.errors import SpecdecError
from offload.storage.direct_io import StorageError
from specdec.api import LLM, ModelClosed
from specdec.async_llm import AsyncChunk, AsyncLLM, AsyncStream
from specdec.checks import ConfigError
from specdec.engine.outputs import GenerationResult
from specdec.grammar.constraint import Constraint
from specdec.grammar.state import GrammarError
from specdec.grammar.trial import check_cost, end_trials
from specdec.metrics.stats import EngineStats
from specdec.serve.admission import FAILING, READY, AdmissionLimiter, RequestBody, RequestSlot
from specdec.serve.api.answer import Answer
from specdec.serve.endpoint import Endpoint
from specdec.serve.errors import ApiError, bad_request, draining, loading
from specdec.serve.events import End, Event, Failure, OutputParser
from specdec.serve.jobs import Job
from specdec.serve.metrics import Metrics
from specdec.serve.middleware import BODY
from specdec.serve.options import ServeOptions
from specdec.serve.outputs import OutputEvents
from specdec.serve.parsers import output_parser
from specdec.serve.responses import JsonResponse
from specdec.serve.sse import (
    ClientGone,
    EventStream,
    made_in,
    unless_gone,
)
from specdec.text.contract import TokenizerError
from specdec.text.prompts import PromptError

_CLIENTS_FAULT = (ConfigError, GrammarError, PromptError, TokenizerError)
_CLIENT_CLOSED = 499  # nginx's; nobody reads it
T = TypeVar("T")
_PING_SECONDS = 15.0
"""Seconds without a token after which a stream sends a ping: proxies cut silent connections."""


class Service:
    """One LLM for the clients of one server; used in the event loop's thread.

    names: names that clients know the model by, the first of which answers have.
    log: takes a line about an error, for the server's operator.
    """

    def __init__(
        self, options: ServeOptions, names: Sequence[str], log: Callable[[str], None]
    ) -> None:
        self.options, self.names, self._log = options, tuple(names), log
        self.name = self.names[0]
        self.limiter = AdmissionLimiter(options.max_queue)
        self.metrics = Metrics(self.limiter, self._stats)
        self.created = int(time.time())
        self._llm: AsyncLLM | None = None
        self._streams: set[AsyncStream] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        # Long prompts are encoded beside the event loop. One thread: a tokenizer may not be
        # thread-safe, and a body that is parsed takes ten times its bytes.
        self._encoder = ThreadPoolExecutor(1, "specdec-encode")
        # An invalid schema may take seconds to be refused: only requests with a schema wait for it.
        self._trials = ThreadPoolExecutor(1, "specdec-trial")
        self._is_over = False

    async def job(self, body: RequestBody, endpoint: Endpoint, llm: LLM) -> Job:
        """Parse a request, and drop its body."""
        constraint = await made_in(self._encoder, endpoint.constraint, body.content)
        if constraint is not None:
            await made_in(self._trials, self._try, constraint)
        job = await made_in(self._encoder, endpoint.job, body.content, llm)
        body.drop()
        return job

    def _try(self, constraint: Constraint) -> None:
        """Try a constraint. Raises ConfigError, and ApiError while the server ends."""
        try:
            if not self._is_over:
                check_cost(constraint)
        finally:
            if self._is_over:  # the trial may have been interrupted: ignore its outcome
                raise draining()

    def open(self, llm: LLM) -> None:
        """Admit requests from now on."""
        self._llm = AsyncLLM(llm)
        self.limiter.state = READY

    def _stats(self) -> EngineStats:
        return EngineStats() if self._llm is None else self._llm.llm.stats

    @property
    def llm(self) -> AsyncLLM:
        """The loaded model; raises ApiError while it is being loaded."""
        if self._llm is None:
            raise loading()
        return self._llm

    @property
    def has_chat_template(self) -> bool:
        """Return whether the model has a template or one was named; else prompts are plain."""
        llm = self.llm.llm
        is_named = llm.session.options.chat_template is not None
        return is_named or llm.tokenizer.has_chat_template

    @property
    def is_loading(self) -> bool:
        return self._llm is None

    def cancel_all(self) -> None:
        """Cancel all streams, and try no more schemas: the process would wait for that thread."""
        self._is_over = True
        end_trials()
        for stream in list(self._streams):
            stream.cancel()

    async def answer(self, request: Request, endpoint: Endpoint) -> Response:
        """Run a request; raises ApiError."""
        run = _Run(self, request)
        try:
            with self.translated():
                return await run.answer(self.llm, endpoint)
        except ClientGone:
            run.end()
            return Response(status_code=_CLIENT_CLOSED)
        except BaseException:
            run.end()
            raise

    async def compute(self, request: Request, work: Callable[[bytearray, LLM], T]) -> T:
        """Return the result of some work beside the event loop, which generates nothing.

        Raises ApiError.
        """
        body, llm = request.scope[BODY], self.llm.llm
        with self.translated():
            making = made_in(self._encoder, work, body.content, llm)
            try:
                return await unless_gone(request.receive, making, self.options.request_timeout)
            except ClientGone as error:
                raise bad_request("the client went away") from error

    def adopt(self, streams: Sequence[AsyncStream]) -> None:
        self._streams.update(streams)

    def leave(self, slot: RequestSlot, streams: Sequence[AsyncStream]) -> None:
        """End an answer and cancel its unfinished streams.

        The slot is released once no thread works for it any more.
        """
        for stream in streams:
            stream.cancel()
        if all(stream.is_over for stream in streams):
            self._count(slot, streams)
            return
        task = asyncio.get_running_loop().create_task(self._leave(slot, streams))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _leave(self, slot: RequestSlot, streams: Sequence[AsyncStream]) -> None:
        for stream in streams:
            await stream.ended()
        self._count(slot, streams)

    def _count(self, slot: RequestSlot, streams: Sequence[AsyncStream]) -> None:
        for stream in streams:
            self._streams.discard(stream)
            if stream.has_begun:
                self.metrics.add_sequence(stream.result.stats)
        slot.release()

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Raise errors as ApiError; log those that are the server's fault."""
        try:
            yield
            if self.limiter.state == FAILING:
                self.limiter.state = READY
        except _CLIENTS_FAULT as error:
            raise bad_request(str(error)) from error
        except ModelClosed as error:
            raise draining() from error
        except asyncio.TimeoutError as error:
            limit = self.options.request_timeout
            raise ApiError(
                408,
                f"the request took more than {limit:g} s: ask for less",
                # OpenAI's clients retry after 408, and the request would time out again.
                headers={"X-Should-Retry": "false"},
            ) from error
        except SpecdecError as error:
            if isinstance(error, StorageError) and self.limiter.state == READY:
                self.limiter.state = FAILING
            self._log(f"error: {error}")
            raise ApiError(500, "the model failed; the server's log says why") from error


class _Run:
    """One running request. Raises ApiError if it is not admitted."""

    def __init__(self, service: Service, request: Request) -> None:
        self._service, self._request = service, request
        self._slot = service.limiter.acquire()
        self._deadline = time.monotonic() + service.options.request_timeout
        self._streams: list[AsyncStream] = []

    async def answer(self, llm: AsyncLLM, endpoint: Endpoint) -> Response:
        making = self._service.job(self._request.scope[BODY], endpoint, llm.llm)
        job = await unless_gone(self._request.receive, making, self._left)
        answer = endpoint.answer(job, llm.llm)
        options = {"priority": job.priority, "cache_prompt": job.caches_prompt}
        self._streams = [llm.stream(ids, job.params, **options) for ids in job.prompts]
        self._service.adopt(self._streams)
        if job.streams_output:
            # Errors of the request are known once the first stream has started: send their status.
            await unless_gone(self._request.receive, self._streams[0].started(), self._left)
            return EventStream(self._event_bytes(answer, job), answer.media_type, self.end)
        results = await unless_gone(self._request.receive, self._results(), self._left)
        self.end()
        new_parser = self._new_parser(job)
        events = OutputEvents(job, new_parser, lambda: results)
        choices = events.whole()
        return JsonResponse(answer.whole(choices, events.usage))

    def end(self) -> None:
        """End the request; idempotent."""
        streams, self._streams = self._streams, []
        self._service.leave(self._slot, streams)

    @property
    def _left(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)

    async def _results(self) -> list[GenerationResult]:
        return list(await asyncio.gather(*(self._result(stream) for stream in self._streams)))

    async def _result(self, stream: AsyncStream) -> GenerationResult:
        async for _ in stream:
            pass
        if stream.is_cancelled:
            raise draining()
        return stream.result

    def _new_parser(self, job: Job) -> Callable[[], OutputParser]:
        return lambda: output_parser(job, self._service.llm.llm.tokenizer)

    async def _event_bytes(self, answer: Answer, job: Job) -> AsyncIterator[bytes]:
        """Yield the events; an error is the last event."""
        for frame in answer.begin():
            yield answer.encode(frame)
        try:
            with self._service.translated():
                async for event in self._events(job):
                    if event is None:
                        yield answer.ping
                        continue
                    for frame in answer.write(event):
                        yield answer.encode(frame)
        except ApiError as error:
            for frame in answer.write(Failure(error)):
                yield answer.encode(frame)
        if answer.closing:
            yield answer.closing

    async def _events(self, job: Job) -> AsyncIterator[Event | None]:
        """Yield the events; None where nothing happened for a while."""
        streams = list(self._streams)

        def results() -> list[GenerationResult]:
            return [stream.result for stream in streams if stream.has_begun]

        events = OutputEvents(job, self._new_parser(job), results)
        async for index, chunk in self._chunks(streams):
            if index is None:
                yield None
                continue
            base = index * job.n_per_prompt
            copies = [base + copy * job.params.n for copy in range(job.n_copies)]
            for event in _events_of(streams[index], chunk, events, copies):
                yield event
        yield End(events.usage)

    async def _chunks(
        self, streams: Sequence[AsyncStream]
    ) -> AsyncIterator[tuple[int | None, AsyncChunk | None]]:
        """Yield (index of the stream, its chunk or None at its end) as chunks arrive; (None, None)
        after _PING_SECONDS without a chunk."""
        pending = {asyncio.create_task(_next(stream)): i for i, stream in enumerate(streams)}
        try:
            while pending:
                seconds = min(_PING_SECONDS, self._left)
                done, _ = await asyncio.wait(pending, timeout=seconds, return_when=FIRST_COMPLETED)
                if not self._left:  # also if chunks are ready for a client that reads slowly
                    raise asyncio.TimeoutError
                if not done:
                    yield None, None
                for task in done:
                    index, chunk = pending.pop(task), task.result()
                    yield index, chunk
                    if chunk is not None:
                        pending[asyncio.create_task(_next(streams[index]))] = index
        finally:
            for task in pending:
                task.cancel()


async def _next(stream: AsyncStream) -> AsyncChunk | None:
    """Return the next chunk; None at the end. Raises ApiError if the server ended the stream."""
    async for chunk in stream:
        return chunk
    if stream.is_cancelled:
        raise draining()
    return None


def _events_of(
    stream: AsyncStream, chunk: AsyncChunk | None, events: OutputEvents, copies: Sequence[int]
) -> Iterator[Event]:
    """Yield the events of a chunk of one prompt, or of its end. copies: the first choice of each of
    its equal copies."""
    for copy in copies:
        if chunk is not None:
            yield events.step(chunk, copy + chunk.index)
        else:
            for i, output in enumerate(stream.result.outputs):
                yield from events.finish(output, copy + i)
