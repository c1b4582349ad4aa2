"""Admission of requests: the server's state, how many there are, and how many bytes they hold."""

from __future__ import annotations

import asyncio

from specdec.serve.errors import ApiError, draining, loading
from specdec.serve.responses import State

STARTING: State = "starting"
READY: State = "ready"
DRAINING: State = "draining"
FAILING: State = "failing"
"""The last request could not read the model's files; the next ones are admitted all the
same."""


class AdmissionLimiter:
    """Limits the requests that run or wait. Used from the event loop's thread only."""

    def __init__(self, max_requests: int) -> None:
        self.state: State = STARTING
        self.num_requests = 0
        self._max_requests = max_requests
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def acquire(self) -> RequestSlot:
        """Raise ApiError where no request, or no more of them, may be admitted."""
        if self.state == STARTING:
            raise loading()
        if self.state == DRAINING:
            raise draining()
        if self.num_requests >= self._max_requests:
            raise ApiError(
                429,
                f"{self.num_requests} requests run or wait, this server takes no more: ask again",
                code="queue_full",
                headers={"Retry-After": "5"},
            )
        self.num_requests += 1
        self._is_empty.clear()
        return RequestSlot(self)

    def release(self) -> None:
        self.num_requests -= 1
        if not self.num_requests:
            self._is_empty.set()

    async def wait_until_empty(self, seconds: float) -> bool:
        """Return whether all requests have ended in time."""
        try:
            await asyncio.wait_for(self._is_empty.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        return True


class RequestSlot:
    """The slot of one request."""

    def __init__(self, limiter: AdmissionLimiter) -> None:
        self._limiter: AdmissionLimiter | None = limiter

    def release(self) -> None:
        """Idempotent."""
        limiter, self._limiter = self._limiter, None
        if limiter is not None:
            limiter.release()


class BodyLimiter:
    """Limits the bytes of all bodies together that have not been parsed yet."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0


class RequestBody:
    """The body of one request, as it arrives; it counts until it is dropped."""

    def __init__(self, limiter: BodyLimiter) -> None:
        self.content = bytearray()
        self._limiter = limiter

    def add(self, read_chunk: bytes) -> None:
        """Raise ApiError where all bodies together would be too long."""
        if self._limiter.num_bytes + len(read_chunk) > self._limiter.max_bytes:
            raise ApiError(
                503,
                "this server has too many long requests to read: ask again",
                headers={"Retry-After": "5"},
            )
        self._limiter.num_bytes += len(read_chunk)
        self.content += read_chunk

    def drop(self) -> None:
        """Idempotent."""
        self._limiter.num_bytes -= len(self.content)
        self.content = bytearray()
