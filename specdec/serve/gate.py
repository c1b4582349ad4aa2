"""Who may come in: the server's state, how many requests are inside, and how long all are."""

from __future__ import annotations

import asyncio

from specdec.serve.errors import ApiError, draining, loading

STARTING, READY, FAILING, DRAINING = "starting", "ready", "failing", "draining"
STATES = (STARTING, READY, FAILING, DRAINING)
"""FAILING: the model's files could not be read by the last one who tried; whoever comes is let in
all the same."""


class Gate:
    """Used from the event loop's thread only."""

    def __init__(self, most: int) -> None:
        self.state = STARTING
        self.n_inside = 0
        self._most = most
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def enter(self) -> Visit:
        """Raises ApiError where nobody, or nobody more, may come in."""
        if self.state == STARTING:
            raise loading()
        if self.state == DRAINING:
            raise draining()
        if self.n_inside >= self._most:
            raise ApiError(
                429,
                f"{self.n_inside} requests run or wait, this server takes no more: ask again",
                code="queue_full",
                headers={"Retry-After": "5"},
            )
        self.n_inside += 1
        self._is_empty.clear()
        return Visit(self)

    def leave(self) -> None:
        self.n_inside -= 1
        if not self.n_inside:
            self._is_empty.set()

    async def wait_until_empty(self, seconds: float) -> bool:
        """Whether everybody has left in time."""
        try:
            await asyncio.wait_for(self._is_empty.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        return True


class Visit:
    """One request's stay; it leaves once, however often it is told to."""

    def __init__(self, gate: Gate) -> None:
        self._gate: Gate | None = gate

    def leave(self) -> None:
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.leave()


class Bodies:
    """How many bytes the requests hold together that have not been read into jobs yet."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.n_bytes = most_bytes, 0


class Body:
    """One request's body, as it arrives; it is held until it is dropped."""

    def __init__(self, bodies: Bodies) -> None:
        self.content = bytearray()
        self._bodies = bodies

    def add(self, piece: bytes) -> None:
        """Raises ApiError where all requests together would be too long."""
        if self._bodies.n_bytes + len(piece) > self._bodies.most_bytes:
            raise ApiError(
                503,
                "this server has too many long requests to read: ask again",
                headers={"Retry-After": "5"},
            )
        self._bodies.n_bytes += len(piece)
        self.content += piece

    def drop(self) -> None:
        """Idempotent."""
        self._bodies.n_bytes -= len(self.content)
        self.content = bytearray()
