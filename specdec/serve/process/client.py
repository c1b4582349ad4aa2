"""The server's side: one running engine, and the requests that it has."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

from specdec.metrics.stats import EngineStats, GenerationStats
from specdec.serve.errors import ApiError, broken
from specdec.serve.process.messages import (
    WINDOW,
    AskBeat,
    Beat,
    Cancel,
    Compute,
    Ended,
    Failed,
    Generate,
    Loaded,
    Output,
    Planned,
    ServedModel,
    Taken,
    frame,
    read_message,
)

_FRESH_SECONDS = 1.0
"""Longest wait for statistics that are asked for; the last ones are at most a second old."""


class EngineRequest:
    """One request that the engine has.

    Attributes:
        ended: set to the statistics of its prompts once nothing is computed for it any more.
    """

    def __init__(self, cancel: Callable[[], None], take: Callable[[int], None]) -> None:
        self._cancel, self._take = cancel, take
        self._num_taken = 0
        self._values: deque[Any] = deque()
        self._has_values = asyncio.Event()
        self._is_cancelled = False
        self.ended: asyncio.Future[Sequence[GenerationStats]]
        self.ended = asyncio.get_running_loop().create_future()

    async def next(self, seconds: float | None = None) -> Any:
        """Return the next value of an `Output`. Raises the ApiError that ended the request, and
        asyncio.TimeoutError."""
        while not self._values:
            self._has_values.clear()
            await asyncio.wait_for(self._has_values.wait(), seconds)
        if isinstance(self._values[0], ApiError):
            raise self._values[0]  # nothing follows it
        self._num_taken += 1
        if self._num_taken == WINDOW // 4:
            self._take(self._num_taken)
            self._num_taken = 0
        return self._values.popleft()

    def put(self, value: Any) -> None:
        """Add a value, or the ApiError that ended it."""
        self._values.append(value)
        self._has_values.set()

    def end(self, stats: Sequence[GenerationStats] = ()) -> None:
        if not self.ended.done():
            self.ended.set_result(stats)

    def cancel(self) -> None:
        """Cancel it without waiting for its end. Idempotent."""
        if not self._is_cancelled and not self.ended.done():
            self._is_cancelled = True
            self._cancel()

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled


class EngineClient:
    """Connection to one engine process; used in the event loop's thread.

    on_loaded: called once, when the engine takes requests.

    Attributes:
        num_messages: messages received so far; it grows every second while the engine lives.
        has_answered: whether any request got output.
    """

    def __init__(self, on_loaded: Callable[[], None]) -> None:
        self.model: ServedModel | None = None
        self.beat = Beat(EngineStats(), 0)
        self.num_messages = 0
        self.has_answered = False
        self.requests: dict[int, EngineRequest] = {}
        self._on_loaded = on_loaded
        self._ids = count(1)
        self._writer: asyncio.StreamWriter | None = None
        self._is_ended = False
        self._has_beaten = asyncio.Event()

    async def run(self, ours: socket.socket) -> None:
        """Receive messages until the engine's process has closed its end."""
        reader, self._writer = await asyncio.open_connection(sock=ours)
        if self._is_ended:
            self._writer.write_eof()
        try:
            while True:
                self._take(await read_message(reader))
                self.num_messages += 1
        except (EOFError, OSError):
            pass
        finally:
            self._writer.close()

    def end(self) -> None:
        """Send no more, upon which the engine frees its model and exits. Idempotent."""
        self._is_ended = True
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write_eof()

    def abandon(self, error: ApiError) -> None:
        """End all requests with an error, once the process is gone."""
        requests, self.requests = self.requests, {}
        for request in requests.values():
            request.put(error)
            request.end()

    def _take(self, message: Any) -> None:
        match message:
            case Beat():
                self.beat = message
                self._has_beaten.set()
            case Loaded(model):
                self.model = model
                self._on_loaded()
            case Planned(plan) if self.model is not None:
                self.model = replace(self.model, plan=plan)
            case Output(id, value) if id in self.requests:
                self.has_answered = True
                self.requests[id].put(value)
            case Failed(id, error, is_storage) if id in self.requests:
                self.requests[id].put(StorageFailure.of(error) if is_storage else error)
            case Ended(id, stats) if id in self.requests:
                request = self.requests.pop(id)
                request.put(broken())  # nobody reads it, unless the last value is missing
                request.end(stats)

    # --- requests ------------------------------------------------------------------------------

    def generate(self, form: bytes) -> EngineRequest:
        """Start a request, a pickled ChatRequest or CompletionRequest."""
        return self._start(lambda id: Generate(id, form))

    def compute(self, function: Callable[[Any, Any], Any], form: bytes) -> EngineRequest:
        """Start `function(form, llm)`, whose result is the first value. form: pickled."""
        return self._start(lambda id: Compute(id, function, form))

    def _start(self, message: Callable[[int], Any]) -> EngineRequest:
        id = next(self._ids)
        request = self.requests[id] = EngineRequest(
            lambda: self._send(Cancel(id)), lambda num: self._send(Taken(id, num))
        )
        self._send(message(id))
        return request

    def _send(self, message: Any) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message))

    async def refresh(self) -> None:
        """Wait for statistics of this moment, for a second at most."""
        self._has_beaten.clear()
        self._send(AskBeat())
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._has_beaten.wait(), _FRESH_SECONDS)


class StorageFailure(ApiError):
    """The model's files cannot be read: an error of all requests, not of this one."""

    @classmethod
    def of(cls, error: ApiError) -> StorageFailure:
        return cls(error.status, error.message, param=error.param, code=error.code)
