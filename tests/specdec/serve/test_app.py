"""The application without a server: unforeseen errors."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from engines import router_of_one

from specdec.serve.admission import RequestBody
from specdec.serve.app import make_app
from specdec.serve.middleware import BODY, MAX_BODIES, LimitMiddleware
from specdec.serve.options import ServeOptions
from specdec.serve.router.budget import Budget
from specdec.serve.service import Service


def get(app: Any, path: str, method: str = "GET") -> list[dict[str, Any]]:
    """Return the messages of the answer."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
    }
    with suppress(Exception):  # it is passed on to the server, which closes the connection
        asyncio.run(app(scope, receive, send))
    return sent


def test_an_error_of_ours_has_the_shape_of_all_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It used to be plain text, on which JSON clients fail."""
    service = Service(ServeOptions(), router_of_one(is_loaded=False))

    def fail() -> bytes:
        raise RuntimeError("the text of a prompt")

    monkeypatch.setattr(service.metrics, "text", fail)
    start, *rest = get(
        make_app(service, Budget(service, print, lambda runner: None), None), "/metrics"
    )
    assert start["status"] == 500
    assert (b"content-type", b"application/json") in start["headers"]
    body = json.loads(b"".join(item.get("body", b"") for item in rest))
    assert body["error"]["type"] == "server_error"
    log = capsys.readouterr().err
    assert "RuntimeError at fail" in log
    assert "prompt" not in log


def test_head_is_answered_as_get() -> None:
    """Monitoring programs use it; the application's host drops the body."""
    service = Service(ServeOptions(), router_of_one(is_loaded=False))
    app = make_app(service, Budget(service, print, lambda runner: None), None)
    for method in ("GET", "HEAD"):
        assert get(app, "/health", method)[0]["status"] == 503
    assert get(app, "/v1/completions", "HEAD")[0]["status"] == 405


def test_what_is_not_there_is_named() -> None:
    service = Service(ServeOptions(), router_of_one(is_loaded=False))
    app = make_app(service, Budget(service, print, lambda runner: None), None)
    messages = []
    for path in ("/v2/models", "/v1/completions", "/api/none"):
        body = json.loads(b"".join(item.get("body", b"") for item in get(app, path)))
        error = body["error"]
        messages.append(error if isinstance(error, str) else error["message"])
    assert messages == [
        "there is no GET /v2/models here",
        "/v1/completions takes POST, not GET",
        "there is no GET /api/none here",
    ]


def test_health_has_why_an_engine_is_given_up() -> None:
    router = router_of_one()
    service = Service(ServeOptions(), router)
    app = make_app(service, Budget(service, print, lambda runner: None), None)
    assert get(app, "/health")[1]["body"] == b'{"status":"ready"}'
    (replica,) = router.runners[0].replicas
    replica.lose(is_final=True)
    replica.given_up = "its machine cannot run it"
    assert json.loads(get(app, "/health")[1]["body"]) == {
        "status": "failed",
        "errors": ["engine: its machine cannot run it"],
    }


@pytest.mark.parametrize("limit", ["bodies", "requests"])
def test_what_all_requests_hold_together_has_a_limit(limit: str) -> None:
    """Each of 256 connections may send the longest request at the same time."""
    max_connections = 256 if limit == "bodies" else MAX_BODIES
    limits = ServeOptions(max_body="1KiB", max_connections=max_connections)
    may_end = asyncio.Event()
    inside: list[RequestBody] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        inside.append(scope[BODY])
        await may_end.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    middleware = LimitMiddleware(app, limits, None, frozenset(), lambda path, status, seconds: None)
    scope = {"type": "http", "method": "POST", "path": "/x", "headers": [(b"host", b"localhost")]}

    async def post() -> int:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"x" * 1024, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await middleware(scope, receive, send)
        return int(sent[0]["status"])

    async def work() -> None:
        first = [asyncio.create_task(post()) for _ in range(MAX_BODIES)]
        while len(inside) < MAX_BODIES:
            await asyncio.sleep(0)
        assert await post() == 503
        inside[0].drop()  # it is parsed
        last = asyncio.create_task(post())
        may_end.set()
        last_status = 200 if limit == "bodies" else 503
        assert await asyncio.gather(*first, last) == [200] * MAX_BODIES + [last_status]
        assert await post() == 200
        assert middleware._bodies.num_bytes == 0

    asyncio.run(asyncio.wait_for(work(), 30))
