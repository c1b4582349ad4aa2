"""Conformance cases of the server: a request, and what must come back."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from serving import JSON, Server, ask

ABSENT = object()
"""Expectation: there is no such entry."""
NONEMPTY = re.compile(r"(?s).+")
HI = [{"role": "user", "content": "Say hi."}]
SYSTEM = [{"role": "system", "content": "Be brief."}, *HI]

Check = Callable[[Any], bool]


@dataclass(frozen=True)
class Case:
    """One request and what must come back.

    name: the property, and where llama.cpp's or vLLM's tests assert it.
    expect: {path into the answer: a value, a type, a pattern, ABSENT, ... or a function}. Of a
    stream, the answer is the list of its events; a path may begin with a negative index.
    reason: why the server does not do it; such a case must fail.
    """

    name: str
    path: str
    body: Any = None
    status: int = 200
    expect: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""

    @property
    def method(self) -> str:
        return "GET" if self.body is None else "POST"

    @property
    def is_stream(self) -> bool:
        is_ollama = self.path in ("/api/chat", "/api/generate")
        asked = self.body.get("stream", is_ollama) if isinstance(self.body, dict) else False
        return bool(asked) and self.status == 200


def run_case(server: Server, case: Case) -> str | None:
    """Return what is wrong with the answer to a case's request; None if nothing is."""
    data = None
    if case.body is not None:
        data = case.body.encode() if isinstance(case.body, str) else json.dumps(case.body).encode()
    request = urllib.request.Request(
        server.url + case.path, data, {**JSON, **case.headers}, method=case.method
    )
    status, text = ask(request)
    if status != case.status:
        return f"status {status}: {text[:300]}"
    answer = read_stream(text) if case.is_stream else _json(text)
    for path, expected in case.expect.items():
        actual = _at(answer, path)
        if not _is(actual, expected):
            return f"{path} is {actual!r:.300}, expected {expected!r:.100}"
    return None


def read_stream(text: str) -> list[Any]:
    """Return the values of a stream, of server-sent events or of lines of JSON."""
    if text.startswith("{"):
        return [json.loads(line) for line in text.splitlines()]
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _at(value: Any, path: str) -> Any:
    for part in path.split(".") if path else []:
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (LookupError, TypeError, ValueError):
            return ABSENT
    return value


def _is(actual: Any, expected: Any) -> bool:
    if actual is ABSENT or expected is ABSENT:
        return actual is expected
    if expected is ...:
        return True
    if isinstance(expected, re.Pattern):
        return isinstance(actual, str) and expected.search(actual) is not None
    if isinstance(expected, type):
        return isinstance(actual, expected)
    return bool(expected(actual)) if callable(expected) else bool(actual == expected)


def refused(param: str, message: str = "") -> dict[str, Any]:
    """Return the expectation of an error that names this field, in OpenAI's shape."""
    return {
        "error.param": param,
        "error.type": "invalid_request_error",
        "error.message": re.compile(message),
    }
