"""The service behind the routes: the requests that it admits, and their answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from starlette.requests import Request

from specdec.metrics.stats import GenerationStats
from specdec.serve.admission import AdmissionLimiter, RequestSlot
from specdec.serve.endpoint import Reading
from specdec.serve.errors import ApiError, bad_request, draining
from specdec.serve.metrics import Metrics
from specdec.serve.middleware import BODY
from specdec.serve.options import ServeOptions
from specdec.serve.process.client import EngineRequest, StorageFailure
from specdec.serve.process.messages import pickled
from specdec.serve.responses import State
from specdec.serve.router.prefixes import prompt_prefixes
from specdec.serve.router.router import ModelRouter
from specdec.serve.router.runner import ModelRunner
from specdec.serve.sse import ClientGone, made_in, unless_gone

T = TypeVar("T")

_STATES: dict[str, State] = {
    "unloaded": "ready",
    "waiting": "ready",
    "unloading": "ready",
    "starting": "starting",
    "ready": "ready",
    "restarting": "restarting",
    "failing": "failing",
    "failed": "failed",
}
"""State of a server of one model, by the model's; one that is loaded on demand takes requests."""


class Service:
    """The models of one server for its clients; used in the event loop's thread."""

    def __init__(self, options: ServeOptions, router: ModelRouter) -> None:
        self.options, self.router = options, router
        self.limiter = AdmissionLimiter(options.max_queue)
        self.metrics = Metrics(self.limiter, router, lambda: self.state)
        self.created = int(time.time())
        self._requests: set[EngineRequest] = set()
        # Bodies are parsed beside the event loop. One thread: a body that is parsed takes ten times
        # its bytes.
        self._parser = ThreadPoolExecutor(1, "specdec-parse")

    @property
    def state(self) -> State:
        """The server's state. One of several models takes requests, whatever is loaded."""
        if self.limiter.is_draining:
            return "draining"
        only = self.router.only
        if only is None:
            return "ready"
        if not only.has_been_loaded and only.options.on_startup:
            return "failed" if only.state == "failed" else "starting"
        return _STATES["ready" if only.has_been_loaded and only.state == "starting" else only.state]

    def cancel_all(self) -> None:
        """End all requests with an error: the server ends."""
        for request in list(self._requests):
            request.put(draining())
            request.cancel()

    # --- requests ------------------------------------------------------------------------------

    async def form(
        self, read: Callable[[bytearray], Reading], content: bytearray
    ) -> tuple[bytes, Reading]:
        """Return (the pickled form of what `read` returns, the rest of that). Raises ApiError."""

        def work() -> tuple[bytes, Reading]:
            reading = read(content)
            has_choice = len(self.router.find(reading.model).replicas) > 1
            prefixes = prompt_prefixes(reading.form) if has_choice else ()
            try:
                return pickled(reading.form), replace(reading, form=None, prefixes=prefixes)
            except RecursionError as error:
                raise bad_request("the request is nested too deeply") from error

        return await self.parsed(work)

    async def parsed(self, parse: Callable[[], T]) -> T:
        """Return the result of a function that parses, in the thread for that."""
        return await made_in(self._parser, parse)

    async def compute(
        self,
        request: Request,
        read: Callable[[bytearray], Reading],
        function: Callable[[Any, Any], Any],
    ) -> Any:
        """Return the result of a function of (what `read` returns, LLM), which generates nothing.

        Raises ApiError.
        """
        body = request.scope[BODY]
        asked: EngineRequest | None = None
        runner: ModelRunner | None = None

        async def work() -> Any:
            nonlocal asked, runner
            form, reading = await self.form(read, body.content)
            named = self.router.find(reading.model)
            engine = await self.router.acquire(named)
            runner = named
            asked = engine.compute(function, form)
            return await asked.next()

        try:
            return await self.awaited(request, work(), lambda: runner)
        finally:
            if asked is not None:
                asked.cancel()
            if runner is not None:
                runner.end()

    async def load(self, reading: Reading, request: Request) -> None:
        """Load the model that a request names. Raises ApiError."""

        async def work() -> None:
            runner = self.router.find(reading.model)
            await self.router.acquire(runner, reading.keep_alive)
            runner.end()

        await self.awaited(request, work(), lambda: None)

    async def awaited(
        self,
        request: Request,
        work: Coroutine[Any, Any, T],
        runner: Callable[[], ModelRunner | None],
    ) -> T:
        """Return the result of some work, unless the client leaves or its time is over. runner: see
        `translated`. Raises ApiError."""
        with self.translated(runner):
            try:
                return await unless_gone(request.receive, work, self.options.request_timeout)
            except ClientGone as error:
                raise bad_request("the client went away") from error

    def adopt(self, request: EngineRequest) -> None:
        self._requests.add(request)

    def leave(
        self, slot: RequestSlot, runner: ModelRunner | None, request: EngineRequest | None
    ) -> None:
        """End an answer and cancel its request.

        The slot is released once nothing is computed for it any more.
        """
        if runner is None or request is None:
            slot.release()
            return
        request.cancel()

        def count(ended: asyncio.Future[Sequence[GenerationStats]]) -> None:
            self._requests.discard(request)
            for stats in ended.result():
                self.metrics.add_sequence(runner, stats)
            runner.end()
            slot.release()

        request.ended.add_done_callback(count)

    @contextmanager
    def translated(self, runner: Callable[[], ModelRunner | None]) -> Iterator[None]:
        """Note whether the model's files can be read. Raises timeouts as ApiError.

        runner: returns the model whose engine has the request, if one has.
        """

        def note(*, is_storage: bool) -> None:
            model = runner()
            if model is not None:
                model.note_failure(is_storage=is_storage)

        try:
            yield
            note(is_storage=False)
        except asyncio.TimeoutError as error:
            limit = self.options.request_timeout
            raise ApiError(
                408,
                f"the request made no progress for {limit:g} s: ask for less, or when the server "
                "is less busy",
                # OpenAI's clients retry after 408, and the request would time out again.
                headers={"X-Should-Retry": "false"},
            ) from error
        except StorageFailure:
            note(is_storage=True)
            raise
