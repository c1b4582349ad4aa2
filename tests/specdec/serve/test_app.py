"""The application without a server: errors that nobody has foreseen."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from specdec.serve.app import make_app
from specdec.serve.options import ServeOptions
from specdec.serve.service import Service


def get(app: Any, path: str) -> list[dict[str, Any]]:
    """The messages of the answer."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
    }
    with suppress(Exception):  # it goes on to the server, which closes the connection
        asyncio.run(app(scope, receive, send))
    return sent


def test_an_error_of_ours_has_the_shape_of_all_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It came as plain text, at which clients stumble that read JSON."""
    service = Service(ServeOptions(), "m", print)

    def fail() -> bytes:
        raise RuntimeError("the text of a prompt")

    monkeypatch.setattr(service.metrics, "text", fail)
    start, *rest = get(make_app(service, None), "/metrics")
    assert start["status"] == 500
    assert (b"content-type", b"application/json") in start["headers"]
    told = json.loads(b"".join(one.get("body", b"") for one in rest))
    assert told["error"]["type"] == "server_error"
    log = capsys.readouterr().err
    assert "RuntimeError at fail" in log
    assert "prompt" not in log
