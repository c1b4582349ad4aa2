"""Supervisor of the engine's process: it is started, watched, and started again when it has ended.

A process that stops (SIGSTOP) or whose interpreter hangs sends no more signs of life. A pass that
never ends inside a library still lets the thread of these signs run, and nobody can tell it from a
slow pass. It is found in one case: a cancelled pass ends after the layer it is at, so an engine
whose requests are all cancelled, and that does not come to rest, hangs.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from offload.process.memory import process_memory
from specdec.serve.errors import engine_failed, engine_lost
from specdec.serve.process.child import (
    Process,
    ProcessLost,
    ProcessRefused,
    Start,
    described_exit,
    engine_marker,
)
from specdec.serve.process.client import EngineClient

MAX_QUICK_ENDS = 5
"""Ends in a row of engines that gave no output at all, after which none is started any more."""
_MAX_DELAY_SECONDS = 30.0
_USER_ERROR = 2
"""Exit code of a program that has said in a line why it cannot do as told."""


class Users(Protocol):
    """Users of the engine."""

    def open(self, engine: EngineClient) -> None:
        """Send requests to this engine from now on."""

    def lose(self, *, is_final: bool) -> None:
        """Send none until the next `open`. is_final: there will be none."""


class Supervisor:
    """Keeps one engine running.

    say: takes a line for the server's operator. timeout_seconds: time without a sign of life, or
    with cancelled requests only, after which the engine hangs.

    Attributes:
        num_restarts: engines that were started after the first one.
        given_up: why no engine is started any more; empty until then.
    """

    def __init__(
        self, start: Start, users: Users, say: Callable[[str], None], timeout_seconds: float
    ) -> None:
        self._start, self._users, self._say = start, users, say
        self._timeout_seconds = timeout_seconds
        self._client: EngineClient | None = None
        self._process: Process | None = None
        self._ended = asyncio.Event()
        self._num_quick_ends = 0
        self.num_restarts = 0
        self.given_up = ""

    async def run(self) -> int | None:
        """Run engines until `end`. Returns the exit code of the first one if that ended before its
        model was loaded; None otherwise."""
        while not self._ended.is_set():
            client = self._client = EngineClient(self._open)
            reason, code = await self._run_engine(client)
            if self._ended.is_set():
                break
            if client.model is None and not self.num_restarts:
                if code != _USER_ERROR:
                    self._say(f"error: the engine {reason} while it loaded the model")
                return 128 - code if code < 0 else code  # as shells report a signal
            if self.given_up:
                self._say(
                    f"error: the engine {reason}: {self.given_up}, so it stays down until the "
                    "server is started again"
                )
                break
            self._say(f"error: the engine {reason}; it is started again")
            self.num_restarts += 1
            if self._num_quick_ends > 1:
                await self._wait(min(2.0 ** (self._num_quick_ends - 2), _MAX_DELAY_SECONDS))
        return None

    def _open(self) -> None:
        assert self._client is not None, "one is running"
        self._users.open(self._client)

    def _lose(self, client: EngineClient) -> None:
        """End the requests of an engine whose socket is closed."""
        self._num_quick_ends = 0 if client.has_answered else self._num_quick_ends + 1
        if self._num_quick_ends >= MAX_QUICK_ENDS:
            self.given_up = f"it ended {MAX_QUICK_ENDS} times in a row without any output"
        if client.model is not None or self.num_restarts:
            self._users.lose(is_final=bool(self.given_up))
        client.abandon(engine_failed() if self.given_up else engine_lost())

    def _refuse(self) -> None:
        """Give up an engine whose machine cannot run it: a further try would end in the same way.
        At the start of the server that ends the server."""
        if self.num_restarts:
            self.given_up = "its machine cannot run it"
            self._users.lose(is_final=True)

    async def _wait(self, seconds: float) -> None:
        """Wait, unless the server ends."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._ended.wait(), seconds)

    async def _run_engine(self, client: EngineClient) -> tuple[str, int]:
        """Run one engine to its end; return how it ended, and its exit code."""
        ours, theirs = socket.socketpair()
        with theirs:
            marker = engine_marker(theirs, process_memory().rss_bytes)
            try:
                process = self._start(theirs, marker)
            except OSError as error:
                ours.close()
                self._lose(client)
                return f"cannot be started: {error.strerror or error}", 1
        self._process = process
        watching = asyncio.create_task(self._watch(client, process))
        await client.run(ours)
        self._lose(client)  # at once: a core dump takes its time
        # Its memory is free once it has ended.
        loop = asyncio.get_running_loop()
        try:
            code: int = await loop.run_in_executor(None, process.wait)
            described = described_exit(code)
        except ProcessLost as error:
            described, code = f"was lost: {error}", 1
        except ProcessRefused:
            described, code = "cannot begin there", _USER_ERROR
            self._refuse()
        self._process = None
        watching.cancel()
        reason = watching.result() if watching.done() and not watching.cancelled() else None
        return reason or described, code

    async def _watch(self, client: EngineClient, process: Process) -> str:
        """Kill the process once it hangs; return how that showed.

        Times are counted in ticks: a server that was stopped itself has missed no sign.
        """
        tick = min(1.0, self._timeout_seconds / 4)
        last_message, last_requests = 0, tuple[int, ...]()
        silent_seconds = restless_seconds = 0.0
        while True:
            await asyncio.sleep(tick)
            silent_seconds += tick
            restless_seconds += tick
            if client.num_messages != last_message:
                last_message, silent_seconds = client.num_messages, 0.0
            requests = tuple(client.requests)
            are_cancelled = all(request.is_cancelled for request in client.requests.values())
            if not requests or requests != last_requests or not are_cancelled:
                last_requests, restless_seconds = requests, 0.0
            if max(silent_seconds, restless_seconds) >= self._timeout_seconds:
                process.kill()
                is_silent = silent_seconds >= self._timeout_seconds
                what = "gave no sign of life" if is_silent else "did not end cancelled requests"
                return f"{what} for {self._timeout_seconds:g} s and was killed"

    def end(self) -> None:
        """End the engine without waiting; `run` returns once it is gone. One that still loads its
        model is killed: it would only notice afterwards."""
        self._ended.set()
        if self._client is not None:
            self._client.end()
            if self._client.model is None and self._process is not None:
                self._process.kill()
