"""Checks of a request before the application sees it: host, key, size, and time to arrive."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from offload.units import format_bytes
from specdec.serve.admission import BodyLimiter, RequestBody
from specdec.serve.errors import ApiError, bad_request, broken, described_fault
from specdec.serve.options import ServeOptions

OPEN_PATH = "/health"
"""The only path that needs no key: monitoring programs have none."""
MAX_HEAD_BYTES = 32 << 10
MAX_BODIES = 16
"""Limit of unparsed bodies in memory, counted in bodies of the maximum size."""
BODY = "specdec.body"
"""Key of the `RequestBody` in the scope; `receive` then only reports a disconnect."""
_API_KEY = b"x-api-key"  # Anthropic's clients send it
_KEY_HEADERS = (b"authorization", _API_KEY)
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


class LimitMiddleware:
    """ASGI middleware that checks and limits requests.

    A body is read whole, within its limits, before the application is called, which finds it in the
    scope (BODY). HEAD is answered as GET: the server itself leaves the body out.

    More than `max_connections` requests at once are answered with 503.

    Without a key only programs of this machine are served, but no web page of another site in a
    browser: the Host header must name this machine (DNS rebinding), and a JSON body needs its
    content type, which browsers send to other sites only if these allow it (no CORS here).

    on_end: called with (path of the route or "other", status, seconds) after each request.
    """

    def __init__(
        self,
        app: ASGIApp,
        options: ServeOptions,
        key: str | None,
        paths: frozenset[str],
        on_end: Callable[[str, int, float], None],
        is_debug: bool = False,
    ) -> None:
        self._app, self._options, self._paths, self._on_end = app, options, paths, on_end
        self._digest = None if key is None else _digest(key.encode("ascii"))
        self._is_debug = is_debug
        self._bodies = BodyLimiter(MAX_BODIES * options.max_body_bytes)
        self._num_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status, body = time.monotonic(), 0, RequestBody(self._bodies)
        self._num_requests += 1

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if self._num_requests > self._options.max_connections:
                raise _crowded()
            self._check_head(scope)
            await self._read(body, scope, receive)
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            await self._app({**scope, "method": method, BODY: body}, receive, send_and_note)
        except ApiError as error:
            error.headers.setdefault("Connection", "close")  # the body's rest is not read
            await error.response(scope["path"])(scope, receive, send_and_note)
        except Exception as error:
            with suppress(OSError):  # stderr is closed
                self._report(error)
            if status:
                raise _Truncated from None  # cut off: the client must not take it for complete
            await broken().response(scope["path"])(scope, receive, send_and_note)
        finally:
            body.drop()
            self._num_requests -= 1
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._on_end(path, status, time.monotonic() - begin)

    def _check_head(self, scope: Scope) -> None:
        headers = scope["headers"]
        if len(headers) > self._options.max_headers:
            raise ApiError(431, f"the request has more than {self._options.max_headers} headers")
        if sum(len(name) + len(value) for name, value in headers) > MAX_HEAD_BYTES:
            raise ApiError(431, f"the headers are longer than {format_bytes(MAX_HEAD_BYTES)}")
        if scope["path"] == OPEN_PATH:
            return
        if self._digest is not None:
            self._check_key([item for item in headers if item[0] in _KEY_HEADERS])
        elif self._options.is_local:
            hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
            if len(hosts) != 1 or not self._is_this_machine(hosts[0]):
                raise ApiError(
                    403,
                    "without an API key this server answers programs of its own machine only: "
                    "name it localhost, or set a key",
                )

    def _check_key(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Raise ApiError unless there is the key, in one of the headers or the same in both."""
        keys = {_key_of(*item) for item in headers}
        is_twice = len(dict(headers)) < len(headers)
        key = keys.pop() if len(keys) == 1 and not is_twice else b""
        if not hmac.compare_digest(_digest(key), self._digest or b""):
            raise ApiError(
                401,
                "the API key is missing or wrong: send it as Authorization: Bearer KEY, "
                "or X-Api-Key: KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": 'Bearer, Basic realm="specdec: the key as password"'},
            )

    def _is_this_machine(self, host: str) -> bool:
        name, colon, port = host.rpartition(":")
        name = name if colon and port.isdigit() else host
        return name.lower() in {*_LOCAL_NAMES, self._options.host}

    async def _read(self, body: RequestBody, scope: Scope, receive: Receive) -> None:
        limit = self._options.max_body_bytes
        lengths = [value for name, value in scope["headers"] if name == b"content-length"]
        if lengths and lengths[0].isdigit() and int(lengths[0][:20]) > limit:
            raise self._too_large()
        try:
            await asyncio.wait_for(self._collect(body, receive), self._options.read_timeout)
        except asyncio.TimeoutError:
            raise ApiError(
                408, f"the request did not arrive within {self._options.read_timeout:g} s"
            ) from None

    async def _collect(self, body: RequestBody, receive: Receive) -> None:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise bad_request("the client went away")
            body.add(message.get("body", b""))
            if len(body.content) > self._options.max_body_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return

    def _too_large(self) -> ApiError:
        limit = format_bytes(self._options.max_body_bytes)
        return ApiError(413, f"the request is longer than {limit}, the most that is taken here")

    def _report(self, error: Exception) -> None:
        """Print where an error happened; with --debug also its text, which may quote a client."""
        if self._is_debug:
            traceback.print_exception(type(error), error, error.__traceback__)
            return
        print(f"specdec: error: {described_fault(error)}", file=sys.stderr)


class _Truncated(Exception):
    """A response was cut off."""


def _crowded() -> ApiError:
    return ApiError(
        503,
        "this server has too many open connections: ask again",
        headers={"Retry-After": "5"},
    )


def _key_of(name: bytes, header: bytes) -> bytes:
    """Return the key of a client's `Bearer KEY`, of a browser's `Basic`, as its password, or of
    `X-Api-Key`."""
    if name == _API_KEY:
        return header.strip()
    kind, _, value = header.partition(b" ")
    if kind.lower() == b"bearer":
        return value.strip()
    if kind.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(value, validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _digest(key: bytes) -> bytes:
    """Return a digest of fixed length, so that comparing takes as long for every key."""
    return hashlib.sha256(key).digest()
