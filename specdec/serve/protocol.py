"""uvicorn's HTTP connection, with an end to those that stand still or come in crumbs."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from specdec.serve.errors import ApiError, bad_request

MAX_PIECES = 16384
"""Of one body. A chunk costs the event loop the same whether it holds a byte or thousands: a
megabyte in single bytes kept everybody else waiting for seconds."""


class _CountedConnection(h11.Connection):
    """Refuses a body in too many pieces, and tells a head that is too long from what is no HTTP."""

    _n_pieces = 0
    is_head_too_long = False

    def next_event(self) -> Any:
        try:
            found = super().next_event()
        except h11.RemoteProtocolError as error:
            self.is_head_too_long = error.error_status_hint == 431
            raise
        if isinstance(found, h11.Request):
            self._n_pieces = 0
        elif isinstance(found, h11.Data):
            self._n_pieces += 1
        if self._n_pieces > MAX_PIECES:
            raise h11.RemoteProtocolError(f"the body comes in more than {MAX_PIECES} pieces")
        return found


async def crowded(scope: Scope, receive: Receive, send: Send) -> None:
    """The application of connections beyond the limit: its answer is the same to all."""
    headers = {"Retry-After": "5", "Connection": "close"}
    told = ApiError(503, "this server has too many open connections: ask again", headers=headers)
    await told.response()(scope, receive, send)


class TimedProtocol(H11Protocol):
    """A connection whose request head is not there after `read_seconds`, or that takes nothing of
    its answer for `write_seconds`, is cut; one beyond the `most_connections` is told so, and beyond
    twice as many it is cut.

    uvicorn itself waits for both without end: few slow clients would take all connections. Its own
    limit of them answers in plain text, and those that came before are turned away, too.
    """

    read_seconds: float
    write_seconds: float
    most_connections: int
    conn: _CountedConnection
    _reading: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None

    def __init__(self, config: Any, *more: Any, **keywords: Any) -> None:
        super().__init__(config, *more, **keywords)
        most = config.h11_max_incomplete_event_size
        self.conn = _CountedConnection(h11.SERVER, most)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > 2 * self.most_connections:
            self._cut()  # to be told takes a connection, too, until the request is there
            return
        if len(self.connections) > self.most_connections:
            self.app = crowded
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._has_request:
            self._stop_reading()
        elif self._reading is None:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading()
        self._stop_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(self.write_seconds, self._cut)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_writing()
        self._let_go()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._let_go()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._let_go()

    def _let_go(self) -> None:
        """A closed connection stays until its client has taken the end of the answer, which may be
        too short for `pause_writing`."""
        if self.transport.is_closing() and self._writing is None:
            self._writing = self.loop.call_later(self.write_seconds, self._cut)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP, in the shape of all errors; nothing where an answer has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            told = bad_request("this is no HTTP/1.1 request, or one in too many pieces")
            if self.conn.is_head_too_long:
                told = ApiError(431, "the headers are longer than this server takes")
            response = told.response()
            start = h11.Response(
                status_code=told.status,
                reason=HTTPStatus(told.status).phrase,
                headers=[*response.raw_headers, (b"connection", b"close")],
            )
            for one in (start, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(one) or b"")
        self.transport.close()
        self._let_go()

    @property
    def _has_request(self) -> bool:
        """Its head is there; the body has its own time (Guard)."""
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self._reading = self.loop.call_later(self.read_seconds, self._cut)

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _stop_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _cut(self) -> None:
        if self.transport is not None:
            self.transport.abort()


def protocol_with_limits(
    read_seconds: float, write_seconds: float, most_connections: int
) -> type[H11Protocol]:
    values = {
        "read_seconds": read_seconds,
        "write_seconds": write_seconds,
        "most_connections": most_connections,
    }
    return type("LimitedProtocol", (TimedProtocol,), values)
