"""uvicorn's HTTP connection, with an end to those that stand still."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class TimedProtocol(H11Protocol):
    """A connection whose request head is not there after `read_seconds`, or that takes nothing of
    its answer for `write_seconds`, is cut.

    uvicorn itself waits for both without end: few slow clients would take all connections.
    """

    read_seconds: float
    write_seconds: float
    _reading: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
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


def protocol_with_limits(read_seconds: float, write_seconds: float) -> type[H11Protocol]:
    values = {"read_seconds": read_seconds, "write_seconds": write_seconds}
    return type("LimitedProtocol", (TimedProtocol,), values)
