"""Server-sent events, and clients that go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specdec.serve.responses import ResponseModel

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
PING = b": still computing\n\n"  # a comment: clients skip it


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


def event(value: ResponseModel) -> bytes:
    return b"data: " + value.to_json() + b"\n\n"


class EventStream(Response):
    """An answer that is sent as it comes, to its end or until the client goes away.

    on_end: called once, however it ends.
    """

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(media_type="text/event-stream", headers=headers)
        del self.headers["Content-Length"]  # of a body that there is not
        self._events, self._on_end = events, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        except ClientGone:
            pass
        finally:
            self._on_end()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for piece in self._events:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(
    receive: Receive, work: Coroutine[Any, Any, T], seconds: float | None = None
) -> T:
    """Do some work, but not after its client has gone away or its time is over.

    Raises ClientGone, asyncio.TimeoutError, and what the work raises.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    both: set[asyncio.Future[Any]] = {task, gone}
    try:
        done, _ = await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            return task.result()
        raise ClientGone if gone in done else asyncio.TimeoutError
    finally:
        for one in both:
            one.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def made_in(thread: Executor, call: Callable[..., T], *given: Any) -> T:
    """What a call gives that is made in this thread, in its turn.

    Of a client that goes away before, it is not made, and what it was given is let go at once: an
    executor would keep it in its queue, where nobody counts it any more.
    """
    held = [given]
    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(thread, lambda: call(*held.pop()))
    finally:
        held.clear()
