"""Who may come in: the server's state, and how many requests are inside."""

from __future__ import annotations

import asyncio

from specdec.serve.errors import ApiError, draining, loading

STARTING, READY, DRAINING = "starting", "ready", "draining"


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
