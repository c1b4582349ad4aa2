"""Server-sent events, and clients that go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

T = TypeVar("T")


class ClientGone(Exception):
    """The client has disconnected."""


class EventStream(StreamingResponse):
    """Response that is sent as it is generated, until its end or until the client disconnects.

    on_end: called once, however it ends. seconds: time that a client may take to read one part.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        media_type: str,
        on_end: Callable[[], None],
        seconds: float,
    ) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type=media_type)
        self._on_end, self._seconds = on_end, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            try:
                await asyncio.wait_for(send(message), self._seconds)
            except asyncio.TimeoutError:
                raise ClientGone from None

        try:
            await unless_gone(receive, self.stream_response(send_in_time))
        except ClientGone:
            pass
        finally:
            self._on_end()


async def unless_gone(
    receive: Receive, work: Coroutine[Any, Any, T], seconds: float | None = None
) -> T:
    """Return the result of some work, unless its client disconnects or its time is over.

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
        for future in both:
            future.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def made_in(thread: Executor, call: Callable[..., T], *given: Any) -> T:
    """Return the result of a call that is queued for an executor thread.

    If the client disconnects before, the call is not made and its arguments are freed at once: the
    executor's queue would keep them, uncounted.
    """
    arguments = [given]
    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(thread, lambda: call(*arguments.pop()))
    finally:
        arguments.clear()
