"""Life of the server: it listens while the engine loads the model, serves, drains, and ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import uvicorn

from offload.errors import SpecdecError
from specdec.serve.admission import DRAINING
from specdec.serve.app import make_app
from specdec.serve.budget import Budget, ReadBudget
from specdec.serve.middleware import MAX_HEAD_BYTES
from specdec.serve.options import ServeOptions
from specdec.serve.process.child import Start
from specdec.serve.process.client import EngineClient
from specdec.serve.process.supervisor import Supervisor
from specdec.serve.service import Service

_KEEP_ALIVE_SECONDS = 5
_BACKLOG = 128
_MAX_INT = 2**31 - 1
_CANCEL_SECONDS = 5.0
"""Time for cancelled requests to end, and for their answers to be written."""


class ServeError(SpecdecError):
    """The server cannot listen."""


_REPEATED = ("/health", "/metrics")


class HowEnded(NamedTuple):
    """How a server ended: the signal, or the exit code of an engine that could not load the model
    and has said why; 0 otherwise."""

    signal: int = 0
    load_error: int = 0


class IdleConnections:
    """Closes connections that have no request.

    uvicorn has no time limit for a request's head, and answers all clients with 503 when there
    are too many connections: one client with enough idle ones would block all others. Here an
    idle connection is closed after `read_timeout`, and if there are more than `max_connections`,
    the longest idle ones are closed at once.
    """

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._idle: dict[Any, tuple[Any, float]] = {}
        """{connection: (its last request or None, time since when it has been idle)}"""
        self.connections: set[Any] = set()
        """uvicorn's set of its open connections."""

    async def close(self) -> None:
        """Close connections that are due; uvicorn calls it every second."""
        now, before = time.monotonic(), self._idle
        self._idle = {}
        for connection in self.connections:
            request = connection.cycle
            is_over = request is None or request.response_complete
            # The kernel times out connections whose client has not read all of its answer yet.
            if is_over and not connection.transport.get_write_buffer_size():
                last, since = before.get(connection, (None, now))
                self._idle[connection] = (request, since if last is request else now)
        num_excess = len(self.connections) - self._options.max_connections
        by_time = sorted(self._idle.items(), key=lambda item: item[1][1])
        for i, (connection, (_, since)) in enumerate(by_time):
            if i < num_excess or now - since > self._options.read_timeout:
                connection.transport.abort()


class Serving:
    """One run of the server.

    Args:
        names: names that clients know the model by.
        start: starts the engine's process.
        say: prints a line for whoever runs the server.
        read_budget: reads the memory budget of the config file, at SIGHUP; None: there is no file.
        logs_requests: whether each request is a line, too.
    """

    def __init__(
        self,
        options: ServeOptions,
        names: Sequence[str],
        start: Start,
        say: Callable[[str], None],
        *,
        read_budget: ReadBudget | None = None,
        is_debug: bool = False,
        logs_requests: bool = False,
    ) -> None:
        self._options, self._names, self._start = options, names, start
        self._name = names[0]
        self._print, self._read_budget = say, read_budget
        self._is_debug, self._logs_requests = is_debug, logs_requests
        self._key = options.key()
        self._code: int | None = None  # of an engine that could not load the model
        self._signal = 0

    def run(self) -> HowEnded:
        """Serve until a signal comes. Raises ServeError."""
        with _listening(self._options) as listener:
            asyncio.run(self._serve(listener))
        if self._code is None or self._signal:
            return HowEnded(signal=self._signal)
        return HowEnded(load_error=self._code)

    def _say(self, line: str) -> None:
        """Print a line. A closed pipe or a full disk must not keep the server from ending."""
        with suppress(OSError):
            self._print(line)

    def _log(self, path: str, status: int, seconds: float) -> None:
        """Print a line about a request, without anything of its content; none about those that
        the page and programs repeat to see the server's state."""
        if path not in _REPEATED:
            self._say(f"{path} {status or 'was left by its client'}, {seconds:.2f} s")

    async def _serve(self, listener: socket.socket) -> None:
        self._service = Service(self._options, self._names)
        log = self._log if self._logs_requests else None
        self._budget = Budget(self._service, self._say)
        app = make_app(self._service, self._budget, self._key, is_debug=self._is_debug, log=log)
        idle = IdleConnections(self._options)
        self._server = uvicorn.Server(_config(app, idle))
        idle.connections = self._server.server_state.connections
        self._loop = asyncio.get_running_loop()
        serving = self._loop.create_task(self._server.serve(sockets=[listener]))
        await asyncio.sleep(0)  # uvicorn has set its handlers of signals by then; ours replace them
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)
        if self._read_budget is not None:
            self._loop.add_signal_handler(signal.SIGHUP, self._on_hangup, self._read_budget)
        host, port = listener.getsockname()[:2]
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._say(f"loading {self._name}; {self._url}/health tells when it is there")
        limit = self._options.engine_timeout
        self._supervisor = Supervisor(self._start, self, self._say, limit)
        supervising = self._loop.create_task(self._supervise())
        await serving
        self._supervisor.end()
        await supervising

    async def _supervise(self) -> None:
        try:
            self._code = await self._supervisor.run()
        except BaseException:
            self._stop()
            raise
        if self._code is not None:
            self._stop()

    def open(self, engine: EngineClient) -> None:
        """Serve with this engine from now on."""
        self._service.open(engine)
        self._budgeting = self._loop.create_task(self._budget.restore())
        self._say(f"ready: {self._name} at {self._url}/v1")
        self._say(f"chat page: {self._url}")

    def lose(self, *, is_final: bool) -> None:
        """Serve nothing until the next engine is loaded."""
        self._service.lose(is_final=is_final)
        if not is_final:
            self._service.metrics.engine_restarts.inc()

    def _stop(self) -> None:
        self._server.should_exit = True

    # --- the end -------------------------------------------------------------------------------

    def _on_signal(self, number: int) -> None:
        is_second, self._signal = bool(self._signal), number
        is_loading = self._service.is_loading
        if is_second or is_loading:  # nothing to wait for, or abort at a second signal
            with suppress(OSError):
                sys.stderr.flush()
            os._exit(128 + number if is_second or number == signal.SIGINT else 0)
        self._draining = self._loop.create_task(self._drain())

    def _on_hangup(self, read: ReadBudget) -> None:
        self._budgeting = self._loop.create_task(self._budget.read_again(read))

    async def _drain(self) -> None:
        limiter = self._service.limiter
        limiter.state = DRAINING
        if limiter.num_requests:
            self._say(
                f"ending; {limiter.num_requests} requests have {self._options.drain_timeout:g} s"
            )
        if not await limiter.wait_until_empty(self._options.drain_timeout):
            self._service.cancel_all()
            await limiter.wait_until_empty(_CANCEL_SECONDS)
        self._stop()


def _config(app: object, idle: IdleConnections) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]  # starlette's and uvicorn's types of an application
        http="h11",  # others take a head of any length
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(_CANCEL_SECONDS),
        backlog=_BACKLOG,
        callback_notify=idle.close,
        timeout_notify=0,  # at each of uvicorn's checks, one a second
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )


@contextmanager
def _listening(options: ServeOptions) -> Iterator[socket.socket]:
    """Listen before anything is loaded: a port that is taken is reported at once."""
    try:
        result = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = result[0]
        listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ServeError(
            f"cannot listen at {options.host}, port {options.port}: {error.strerror or error}; "
            "name another --host or --port"
        ) from error
    with listener:
        # The kernel ends connections whose client reads nothing: uvicorn has no such limit.
        milliseconds = max(1, min(int(1000 * options.write_timeout), _MAX_INT))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        yield listener
