"""Life of the server: it listens while the engine loads the model, serves, drains, and ends."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import uvicorn

from offload.errors import SpecdecError
from specdec.serve.app import make_app
from specdec.serve.middleware import MAX_HEAD_BYTES
from specdec.serve.options import ServeOptions
from specdec.serve.router.budget import Budget, ReadBudget
from specdec.serve.router.router import ModelRouter
from specdec.serve.router.runner import ModelRunner
from specdec.serve.router.share import ModelOptions, Share, Starter
from specdec.serve.running.log_file import open_log
from specdec.serve.running.records import OwnRecord, running_servers
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
        models: the models of a preset, or one alone.
        capacity: memory of all engines together; None for one model that is loaded at once.
        starters: return the function that starts a model's engine, one for each replica.
        say: prints a line for whoever runs the server.
        read_budget: reads the memory budget of the config file, at SIGHUP; None: there is no file.
        logs_requests: whether each request is a line, too. In a log file it always is.
    """

    def __init__(
        self,
        options: ServeOptions,
        models: Sequence[ModelOptions],
        capacity: Share | None,
        starters: Sequence[Starter],
        say: Callable[[str], None],
        *,
        read_budget: ReadBudget | None = None,
        is_debug: bool = False,
        logs_requests: bool = False,
    ) -> None:
        self._options, self._print, self._read_budget = options, say, read_budget
        self._runners = [self._runner(model, starters, len(models) > 1) for model in models]
        self._capacity = capacity
        self._write_log = None if options.log_file is None else open_log(options.log_file)
        self._record: OwnRecord | None = None
        self._is_debug, self._logs_requests = is_debug, logs_requests
        self._key = options.key()
        self._load_error = 0  # of an engine that could not load the only model
        self._signal = 0

    def _runner(
        self, model: ModelOptions, starters: Sequence[Starter], has_others: bool
    ) -> ModelRunner:
        def say(line: str) -> None:
            self._say(f"{model.name}: {line}" if has_others else line)

        runner = ModelRunner(model, starters, say, self._options.engine_timeout)
        runner.on_open, runner.on_load_error = self._opened, self._not_loaded
        runner.on_fault = self._stop
        return runner

    def run(self) -> HowEnded:
        """Serve until a signal comes. Raises ServeError."""
        with _listening(self._options) as listener:
            try:
                asyncio.run(self._serve(listener))
            finally:
                self._remove_record()
        if self._signal:
            return HowEnded(signal=self._signal)
        return HowEnded(load_error=self._load_error)

    def _say(self, line: str) -> None:
        """Print a line. A closed pipe or a full disk must not keep the server from ending."""
        with suppress(OSError):
            self._print(line)
        if self._write_log is not None:
            self._write_log(line)

    def _keep_record(self, router: ModelRouter) -> None:
        try:
            self._record = OwnRecord(router.names, self._url)
        except (OSError, SpecdecError) as error:
            self._say(f"note: `specdec ps` does not list this server: {error}")
        else:
            if self._capacity is not None:
                self._record.set_budget(self._capacity.host_bytes)

    def _remove_record(self) -> None:
        if self._record is not None:
            self._record.remove()

    def _log(self, path: str, status: int, seconds: float) -> None:
        """Print a line about a request, without anything of its content; none about those that
        the page and programs repeat to see the server's state."""
        if path in _REPEATED:
            return
        line = f"{path} {status or 'closed by the client'}, {seconds:.2f} s"
        if self._logs_requests:
            self._say(line)
        elif self._write_log is not None:
            self._write_log(line)

    async def _serve(self, listener: socket.socket) -> None:
        router = ModelRouter(self._runners, self._capacity, is_strict=self._options.strict_model)
        self._service = Service(self._options, router)
        self._budget = Budget(self._service, self._say, self._record_budget)
        service, budget, log = self._service, self._budget, self._log
        app = make_app(service, budget, self._key, is_debug=self._is_debug, log=log)
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
        self._keep_record(router)
        self._begin(router)
        try:
            await serving
        finally:
            await router.end()

    def _begin(self, router: ModelRouter) -> None:
        """Load the models of the start."""
        health = f"{self._url}/health"
        if router.only is not None:
            self._say(f"loading {router.only.name}; {health} shows when it is ready")
        else:
            self._say(f"ready: {', '.join(r.name for r in self._runners)} at {self._url}/v1")
            self._say(f"{health} shows which are loaded; chat page: {self._url}")
        for runner in self._runners:
            if runner.options.on_startup:
                router.load(runner)

    def _opened(self, runner: ModelRunner) -> None:
        if self._capacity is not None:
            self._say(f"{runner.name} is loaded")
            return
        self._record_budget(runner)
        self._say(f"ready: {runner.name} at {self._url}/v1")
        self._say(f"chat page: {self._url}")

    def _record_budget(self, runner: ModelRunner) -> None:
        """Let `specdec ps` tell the budget of the only model."""
        if self._record is not None and self._capacity is None:
            self._record.set_budget(int(runner.model.plan["memory_budget_bytes"]))

    def _not_loaded(self, runner: ModelRunner) -> None:
        if self._capacity is None and not runner.has_been_loaded:
            self._load_error = runner.load_error or 0
            self._stop()

    def _stop(self) -> None:
        self._server.should_exit = True

    # --- the end -------------------------------------------------------------------------------

    def _on_signal(self, number: int) -> None:
        is_second, self._signal = bool(self._signal), number
        is_loading = not any(runner.has_been_loaded for runner in self._runners)
        is_loading = is_loading and not self._service.limiter.num_requests
        if is_second or is_loading:  # nothing to wait for, or abort at a second signal
            self._remove_record()
            with suppress(OSError):
                sys.stderr.flush()
            os._exit(128 + number if is_second or number == signal.SIGINT else 0)
        self._draining = self._loop.create_task(self._drain())

    def _on_hangup(self, read: ReadBudget) -> None:
        self._budgeting = self._loop.create_task(self._budget.read_again(read))

    async def _drain(self) -> None:
        limiter = self._service.limiter
        limiter.is_draining = True
        if limiter.num_requests:
            self._say(
                f"shutting down; running requests ({limiter.num_requests}) have "
                f"{self._options.drain_timeout:g} s to end"
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


def _reason(error: OSError) -> str:
    """Return the system's words alone: Python adds the address."""
    if isinstance(error, socket.gaierror) or not error.errno:
        return str(error.strerror or error)
    return os.strerror(error.errno)


def _remedy(error: OSError, port: int) -> str:
    """Return how to end the server of this user that has the port, if it is one's."""
    if error.errno == errno.EADDRINUSE:
        for server in running_servers():
            if urlsplit(server.url).port == port:
                return f"`specdec stop {server.pid}` ends the server {server.names[0]} there, or "
    return ""


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
            f"cannot listen at {options.host}, port {options.port}: {_reason(error)}; "
            f"{_remedy(error, options.port)}name another --host or --port"
        ) from error
    with listener:
        # The kernel ends connections whose client reads nothing: uvicorn has no such limit.
        milliseconds = max(1, min(int(1000 * options.write_timeout), _MAX_INT))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        yield listener
