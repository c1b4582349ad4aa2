"""The server's life: it listens while the model is loaded, serves, drains, and ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import uvicorn

from offload.errors import SpecdecError
from specdec.api import LLM
from specdec.serve.app import make_app
from specdec.serve.gate import DRAINING
from specdec.serve.guard import MAX_HEAD_BYTES
from specdec.serve.options import ServeOptions
from specdec.serve.protocol import protocol_with_limits
from specdec.serve.service import Service

_KEEP_ALIVE_SECONDS = 5
_LAST_SECONDS = 5.0
"""For texts that were cancelled to end, and for their answers to be written."""


class ServeError(SpecdecError):
    """The server cannot listen."""


class _Uvicorn(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ours are the event loop's, see `Serving`."""
        yield


class Serving:
    """One run of the server.

    Args:
        name: that clients know the model by.
        load: gives the LLM, in a thread of its own.
        say: takes a line for whoever runs the server.
    """

    def __init__(
        self,
        options: ServeOptions,
        name: str,
        load: Callable[[], LLM],
        say: Callable[[str], None],
        *,
        is_debug: bool = False,
    ) -> None:
        self._options, self._name, self._load = options, name, load
        self._told = say
        self._is_debug = is_debug
        self._key = options.key()
        self._error: BaseException | None = None
        self._signal = 0

    def run(self) -> int:
        """Serve until a signal comes; returns its number. Raises what loading raised."""
        # Its warnings have words of clients' schemas in them.
        logging.getLogger("specdec.grammar").setLevel(logging.ERROR)
        with _listening(self._options) as listener:
            asyncio.run(self._serve(listener))
        if self._error is not None:
            raise self._error
        return self._signal

    def _say(self, line: str) -> None:
        """A log that nobody reads any more, or a full disk, is no reason not to end, say."""
        with suppress(OSError):
            self._told(line)

    async def _serve(self, listener: socket.socket) -> None:
        self._service = Service(self._options, self._name, self._say)
        app = make_app(self._service, self._key, is_debug=self._is_debug)
        self._server = _Uvicorn(self._config(app))
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)
        host, port = listener.getsockname()[:2]
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._say(f"loading {self._name}; {self._url}/health tells when it is there")
        threading.Thread(target=self._load_it, name="specdec-load", daemon=True).start()
        await self._server.serve(sockets=[listener])

    def _config(self, app: object) -> uvicorn.Config:
        options = self._options
        http = protocol_with_limits(
            options.read_timeout, options.write_timeout, options.max_connections
        )
        return uvicorn.Config(
            app,  # type: ignore[arg-type]  # starlette's and uvicorn's types of an application
            http=http,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(_LAST_SECONDS),
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )

    def _load_it(self) -> None:
        try:
            llm = self._load()
        except BaseException as error:
            self._error = error
            self._loop.call_soon_threadsafe(self._stop)
        else:
            self._loop.call_soon_threadsafe(self._open, llm)

    def _open(self, llm: LLM) -> None:
        if self._service.gate.state == DRAINING:
            return
        self._service.open(llm)
        self._say(f"ready: {self._name} at {self._url}/v1")

    def _stop(self) -> None:
        self._server.should_exit = True

    # --- the end -------------------------------------------------------------------------------

    def _on_signal(self, number: int) -> None:
        is_second, self._signal = bool(self._signal), number
        is_loading = self._service.is_loading
        if is_second or is_loading:  # nobody waits for an answer, or nobody shall
            with suppress(OSError):
                sys.stderr.flush()
            os._exit(128 + number if is_second or number == signal.SIGINT else 0)
        self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        gate = self._service.gate
        gate.state = DRAINING
        if gate.n_inside:
            self._say(f"ending; {gate.n_inside} requests have {self._options.drain_timeout:g} s")
        if not await gate.wait_until_empty(self._options.drain_timeout):
            self._service.cancel_all()
            await gate.wait_until_empty(_LAST_SECONDS)
        self._stop()


@contextmanager
def _listening(options: ServeOptions) -> Iterator[socket.socket]:
    """Bound before anything is loaded: a port that is taken is told at once."""
    try:
        found = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = found[0]
        listener = socket.create_server(address[:2], family=family, backlog=128)
    except OSError as error:
        raise ServeError(
            f"cannot listen at {options.host}, port {options.port}: {error.strerror or error}; "
            "name another --host or --port"
        ) from error
    with listener:
        yield listener
