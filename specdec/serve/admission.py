"""Admission of requests: the server's state, and limits of their number and bytes."""

from __future__ import annotations

import asyncio

from specdec.serve.errors import ApiError, draining


class AdmissionLimiter:
    """Limit of the requests that run or wait. Used in the event loop's thread only."""

    def __init__(self, max_requests: int) -> None:
        self.is_draining = False
        self.num_requests = 0
        self._max_requests = max_requests
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def acquire(self) -> RequestSlot:
        """Return the slot of a new request; raise ApiError if it cannot be admitted."""
        if self.is_draining:
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
    """Slot of one request."""

    def __init__(self, limiter: AdmissionLimiter) -> None:
        self._limiter: AdmissionLimiter | None = limiter

    def release(self) -> None:
        """Release the slot; idempotent."""
        limiter, self._limiter = self._limiter, None
        if limiter is not None:
            limiter.release()


class BodyLimiter:
    """Limit of the bytes of all bodies that have not been parsed yet."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0


class RequestBody:
    """Body of one request, as it arrives; it counts until it is dropped."""

    def __init__(self, limiter: BodyLimiter) -> None:
        self.content = bytearray()
        self._limiter = limiter

    def add(self, data: bytes) -> None:
        """Add received bytes; raise ApiError if all bodies together would be too long."""
        if self._limiter.num_bytes + len(data) > self._limiter.max_bytes:
            raise ApiError(
                503,
                "this server has too many long requests to read: ask again",
                headers={"Retry-After": "5"},
            )
        self._limiter.num_bytes += len(data)
        self.content += data

    def drop(self) -> None:
        """Free the body; idempotent."""
        self._limiter.num_bytes -= len(self.content)
        self.content = bytearray()
