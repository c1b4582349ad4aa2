"""The service behind the routes: one engine, the requests that it admits, and their answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specdec.metrics.stats import GenerationStats
from specdec.serve.admission import (
    DRAINING,
    FAILED,
    FAILING,
    READY,
    RESTARTING,
    AdmissionLimiter,
    RequestSlot,
)
from specdec.serve.api.answer import Answer
from specdec.serve.endpoint import Endpoint
from specdec.serve.errors import (
    ApiError,
    bad_request,
    draining,
    engine_failed,
    engine_lost,
    loading,
)
from specdec.serve.events import End, Failure
from specdec.serve.jobs import JobHead
from specdec.serve.metrics import Metrics
from specdec.serve.middleware import BODY
from specdec.serve.options import ServeOptions
from specdec.serve.process.client import EngineClient, EngineRequest, StorageFailure
from specdec.serve.process.messages import Beat, ServedModel, Whole, pickled
from specdec.serve.responses import JsonResponse
from specdec.serve.sse import ClientGone, EventStream, made_in, unless_gone

_CLIENT_CLOSED = 499  # nginx's; nobody reads it
_PING_SECONDS = 15.0
"""Seconds without a byte after which a stream sends a ping: proxies cut silent connections."""


_NO_ENGINE = {RESTARTING: engine_lost, FAILED: engine_failed}


class Service:
    """One engine for the clients of one server; used in the event loop's thread.

    names: names that clients know the model by, the first of which answers have.
    """

    def __init__(self, options: ServeOptions, names: Sequence[str]) -> None:
        self.options, self.names = options, tuple(names)
        self.name = self.names[0]
        self.limiter = AdmissionLimiter(options.max_queue)
        self.metrics = Metrics(self.limiter, self._beat)
        self.created = int(time.time())
        self._engine: EngineClient | None = None
        self._model: ServedModel | None = None
        self._requests: set[EngineRequest] = set()
        # Bodies are parsed beside the event loop. One thread: a body that is parsed takes ten times
        # its bytes.
        self._parser = ThreadPoolExecutor(1, "specdec-parse")

    # --- the engine ----------------------------------------------------------------------------

    def open(self, engine: EngineClient) -> None:
        """Admit requests from now on, for this engine."""
        self._engine, self._model = engine, engine.model
        if self.limiter.state != DRAINING:
            self.limiter.state = READY

    def lose(self, *, is_final: bool) -> None:
        """Admit none: the engine has ended. is_final: no other one is started."""
        if self._engine is not None:
            self._model = self._engine.model  # as it was planned last
        self._engine = None
        if self.limiter.state != DRAINING:
            self.limiter.state = FAILED if is_final else RESTARTING

    def _beat(self) -> Beat | None:
        return None if self._engine is None else self._engine.beat

    async def refresh(self) -> None:
        """Get the engine's present statistics."""
        if self._engine is not None:
            await self._engine.refresh()

    @property
    def engine(self) -> EngineClient:
        """The running engine; raises ApiError while there is none."""
        if self._engine is None:
            raise _NO_ENGINE.get(self.limiter.state, loading)()
        return self._engine

    @property
    def model(self) -> ServedModel:
        """The loaded model, also while it is loaded again; raises ApiError before."""
        model = self._model if self._engine is None else self._engine.model
        if model is None:
            raise loading()
        return model

    @property
    def is_loading(self) -> bool:
        """Return whether no engine has been loaded yet."""
        return self._model is None

    def cancel_all(self) -> None:
        """End all requests with an error: the server ends."""
        for request in list(self._requests):
            request.put(draining())
            request.cancel()

    # --- requests ------------------------------------------------------------------------------

    async def answer(self, request: Request, endpoint: Endpoint) -> Response:
        """Run a request; raises ApiError."""
        run = _Run(self, request)
        try:
            with self.translated():
                return await run.answer(endpoint)
        except ClientGone:
            run.end()
            return Response(status_code=_CLIENT_CLOSED)
        except BaseException:
            run.end()
            raise

    async def form(self, read: Callable[[bytearray], Any], content: bytearray) -> tuple[bytes, Any]:
        """Return (the pickle of what `read` returns first, its other result). Raises ApiError."""

        def work() -> tuple[bytes, Any]:
            form, repeated = read(content)
            try:
                return pickled(form), repeated
            except RecursionError as error:
                raise bad_request("the request is nested too deeply") from error

        return await made_in(self._parser, work)

    async def compute(
        self,
        request: Request,
        read: Callable[[bytearray], Any],
        function: Callable[[Any, Any], Any],
    ) -> Any:
        """Return the result of a function of (what `read` returns, LLM), which generates nothing.

        Raises ApiError.
        """
        body = request.scope[BODY]
        asked: EngineRequest | None = None

        async def work() -> Any:
            nonlocal asked
            form, _ = await self.form(lambda content: (read(content), None), body.content)
            asked = self.engine.compute(function, form)
            return await asked.next()

        with self.translated():
            try:
                return await unless_gone(request.receive, work(), self.options.request_timeout)
            except ClientGone as error:
                raise bad_request("the client went away") from error
            finally:
                if asked is not None:
                    asked.cancel()

    def adopt(self, request: EngineRequest) -> None:
        self._requests.add(request)

    def leave(self, slot: RequestSlot, request: EngineRequest | None) -> None:
        """End an answer and cancel its request.

        The slot is released once nothing is computed for it any more.
        """
        if request is None:
            slot.release()
            return
        request.cancel()

        def count(ended: asyncio.Future[Sequence[GenerationStats]]) -> None:
            self._requests.discard(request)
            for stats in ended.result():
                self.metrics.add_sequence(stats)
            slot.release()

        request.ended.add_done_callback(count)

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Note whether the model's files can be read. Raises timeouts as ApiError."""
        try:
            yield
            if self.limiter.state == FAILING:
                self.limiter.state = READY
        except asyncio.TimeoutError as error:
            limit = self.options.request_timeout
            raise ApiError(
                408,
                f"nothing came of the request for {limit:g} s: ask for less, or when fewer wait",
                # OpenAI's clients retry after 408, and the request would time out again.
                headers={"X-Should-Retry": "false"},
            ) from error
        except StorageFailure:
            if self.limiter.state == READY:
                self.limiter.state = FAILING
            raise


class _Run:
    """One running request. Raises ApiError if it is not admitted."""

    def __init__(self, service: Service, request: Request) -> None:
        self._service, self._request = service, request
        self._slot = service.limiter.acquire()
        self._limit = service.options.request_timeout
        self._asked: EngineRequest | None = None
        self._is_over = False

    async def answer(self, endpoint: Endpoint) -> Response:
        head, repeated = await unless_gone(self._request.receive, self._begin(endpoint))
        answer = endpoint.answer(head, repeated)
        if head.streams_output:
            frames = self._event_bytes(answer)
            return EventStream(frames, answer.media_type, self.end, self._limit)
        whole = await unless_gone(self._request.receive, self._whole())
        self.end()
        return JsonResponse(answer.whole(whole.choices, whole.usage))

    async def _begin(self, endpoint: Endpoint) -> tuple[JobHead, Any]:
        """Hand the request to the engine; return the job it became, and its repeated fields."""
        body = self._request.scope[BODY]
        form, repeated = await self._service.form(endpoint.read, body.content)
        self._asked = self._service.engine.generate(form)
        self._service.adopt(self._asked)
        head = await self._asked.next(self._limit)
        body.drop()
        return head, repeated

    def end(self) -> None:
        """End the request; idempotent."""
        if not self._is_over:
            self._is_over = True
            self._service.leave(self._slot, self._asked)

    async def _whole(self) -> Whole:
        assert self._asked is not None, "it was handed to the engine"
        while True:
            value = await self._asked.next(self._limit)
            if isinstance(value, Whole):
                return value

    async def _event_bytes(self, answer: Answer) -> AsyncIterator[bytes]:
        """Yield the events; an error is the last event."""
        for frame in answer.begin():
            yield answer.encode(frame)
        try:
            with self._service.translated():
                async for data in self._frames(answer):
                    yield data
        except ApiError as error:
            for frame in answer.write(Failure(error)):
                yield answer.encode(frame)
        if answer.closing:
            yield answer.closing

    async def _frames(self, answer: Answer) -> AsyncIterator[bytes]:
        """Yield the frames of events up to the end, and pings between them.

        Raises asyncio.TimeoutError once the engine has been silent for too long.
        """
        assert self._asked is not None, "it was handed to the engine"
        last_byte = last_value = time.monotonic()
        event: Any = None
        while not isinstance(event, End):
            now = time.monotonic()
            left = min(last_value + self._limit, last_byte + _PING_SECONDS) - now
            try:
                event = await self._asked.next(max(left, 0.0))
            except asyncio.TimeoutError:
                if time.monotonic() >= last_value + self._limit:
                    raise
                event = None
            else:
                last_value = time.monotonic()
            has_written = False
            for frame in answer.write(event) if event is not None else ():
                yield answer.encode(frame)
                has_written = True
            if not has_written and time.monotonic() >= last_byte + _PING_SECONDS:
                yield answer.ping
                has_written = True
            if has_written:
                last_byte = time.monotonic()
