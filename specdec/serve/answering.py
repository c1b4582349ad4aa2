"""One running request, from its body to the last byte of its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specdec.serve.api.answer import Answer
from specdec.serve.endpoint import Endpoint, Reading
from specdec.serve.errors import ApiError
from specdec.serve.events import End, Failure
from specdec.serve.jobs import JobHead
from specdec.serve.middleware import BODY
from specdec.serve.process.client import EngineRequest
from specdec.serve.process.messages import Whole
from specdec.serve.responses import JsonResponse
from specdec.serve.router.runner import ModelRunner
from specdec.serve.service import Service
from specdec.serve.sse import ClientGone, EventStream, unless_gone

_CLIENT_CLOSED = 499  # nginx's; nobody reads it
PING_SECONDS = 15.0
"""Seconds without a byte after which a stream sends a ping: proxies cut silent connections."""


@dataclass(frozen=True)
class _Pickled:
    """A request as the engine takes it, and what else its body said."""

    form: bytes
    reading: Reading


async def answer_to(service: Service, request: Request, endpoint: Endpoint) -> Response:
    """Run a request; raises ApiError."""
    run = RunningRequest(service, request)
    try:
        with service.translated(lambda: run.runner):
            return await run.answer(endpoint)
    except ClientGone:
        run.end()
        return Response(status_code=_CLIENT_CLOSED)
    except BaseException:
        run.end()
        raise


class RunningRequest:
    """One running request. Raises ApiError if it is not admitted."""

    def __init__(self, service: Service, request: Request) -> None:
        self._service, self._request = service, request
        self._slot = service.limiter.acquire()
        self._limit = service.options.request_timeout
        self._asked: EngineRequest | None = None
        self._is_over = False
        self.runner: ModelRunner | None = None
        """The model, once its engine has the request."""

    async def answer(self, endpoint: Endpoint) -> Response:
        receive = self._request.receive
        pickled, runner = await unless_gone(receive, self._read(endpoint))
        beginning = asyncio.ensure_future(self._begin(pickled, runner))
        try:
            if pickled.reading.streams and not runner.is_open:
                # The model is loaded first, which may take minutes.
                await unless_gone(receive, _settled(beginning, PING_SECONDS))
                if not beginning.done():
                    early = endpoint.answer(runner.name, JobHead(), pickled.reading.repeated)
                    frames = self._early_bytes(early, beginning, endpoint, pickled.reading)
                    return EventStream(frames, early.media_type, self.end, self._limit)
            head = await unless_gone(receive, _result(beginning))
        except BaseException:
            beginning.cancel()
            raise
        answer = endpoint.answer(runner.name, head, pickled.reading.repeated)
        if head.streams_output:
            frames = self._event_bytes(answer)
            return EventStream(frames, answer.media_type, self.end, self._limit)
        whole = await unless_gone(receive, self._whole())
        self.end()
        return JsonResponse(answer.whole(whole.choices, whole.usage))

    async def _read(self, endpoint: Endpoint) -> tuple[_Pickled, ModelRunner]:
        """Read the body. Returns the request, and its model."""
        body = self._request.scope[BODY]
        form, reading = await self._service.form(endpoint.read, body.content)
        return _Pickled(form, reading), self._service.router.find(reading.model)

    async def _begin(self, pickled: _Pickled, runner: ModelRunner) -> JobHead:
        """Hand the request to the engine; return the job that it became there."""
        reading = pickled.reading
        acquiring = self._service.router.acquire(runner, reading.keep_alive, reading.prefixes)
        engine = await asyncio.wait_for(acquiring, self._limit)
        self.runner = runner
        if self._is_over:  # the client left as the model was ready
            runner.end()
            raise asyncio.CancelledError
        self._asked = engine.generate(pickled.form)
        self._service.adopt(self._asked)
        head: JobHead = await self._asked.next(self._limit)
        self._request.scope[BODY].drop()
        return head

    def end(self) -> None:
        """End the request; idempotent."""
        if not self._is_over:
            self._is_over = True
            self._service.leave(self._slot, self.runner, self._asked)

    async def _whole(self) -> Whole:
        assert self._asked is not None, "it was handed to the engine"
        while True:
            value = await self._asked.next(self._limit)
            if isinstance(value, Whole):
                return value

    # --- streams -------------------------------------------------------------------------------

    async def _early_bytes(
        self,
        early: Answer,
        beginning: asyncio.Future[JobHead],
        endpoint: Endpoint,
        reading: Reading,
    ) -> AsyncIterator[bytes]:
        """Yield pings until the request has begun, then its events. early: writes the former."""
        try:
            while not beginning.done():
                yield early.ping
                await _settled(beginning, PING_SECONDS)
            with self._service.translated(lambda: self.runner):
                answer = endpoint.answer(early.model, beginning.result(), reading.repeated)
        except ApiError as error:
            for data in self._failure(early, error):
                yield data
            return
        finally:
            beginning.cancel()
        async for data in self._event_bytes(answer):
            yield data

    async def _event_bytes(self, answer: Answer) -> AsyncIterator[bytes]:
        """Yield the events; an error is the last event."""
        for frame in answer.begin():
            yield answer.encode(frame)
        try:
            with self._service.translated(lambda: self.runner):
                async for data in self._frames(answer):
                    yield data
        except ApiError as error:
            for data in self._failure(answer, error):
                yield data
            return
        if answer.closing:
            yield answer.closing

    def _failure(self, answer: Answer, error: ApiError) -> list[bytes]:
        """Return what a stream that failed ends with."""
        ends = [answer.encode(frame) for frame in answer.write(Failure(error))]
        return [*ends, answer.closing] if answer.closing else ends

    async def _frames(self, answer: Answer) -> AsyncIterator[bytes]:
        """Yield the frames of events up to the end, and pings between them.

        Raises asyncio.TimeoutError once the engine has been silent for too long.
        """
        assert self._asked is not None, "it was handed to the engine"
        last_byte = last_value = time.monotonic()
        event: Any = None
        while not isinstance(event, End):
            now = time.monotonic()
            left = min(last_value + self._limit, last_byte + PING_SECONDS) - now
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
            if not has_written and time.monotonic() >= last_byte + PING_SECONDS:
                yield answer.ping
                has_written = True
            if has_written:
                last_byte = time.monotonic()


async def _settled(future: asyncio.Future[Any], seconds: float) -> None:
    """Wait until a future is done, for so long at most."""
    await asyncio.wait({future}, timeout=seconds)


def _result(future: asyncio.Future[JobHead]) -> Coroutine[Any, Any, JobHead]:
    async def wait() -> JobHead:
        return await future

    return wait()
