"""Checks of a request: key, host, size, time; hostile ones end in a 4xx and cost nothing."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import Request

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from serving import JSON, Server, ask

from specdec.serve.api.chat import ChatRequest

ROUTES = [
    ("GET", "/"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("GET", "/v1/plan"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/responses"),
    ("POST", "/api/chat"),
    ("GET", "/api/tags"),
    ("POST", "/tokenize"),
    ("GET", "/props"),
    ("GET", "/docs"),
    ("DELETE", "/nowhere"),
    ("GET", "/health/"),
    ("GET", "//health"),
]
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 0}
TOOL = {"type": "function", "function": {"name": "a", "parameters": "HERE"}}


@pytest.fixture(scope="module")
def locked(served_model: Path) -> Iterator[Server]:
    more = ("--spec-type", "none", "-c", "256", "--max-body", "64KiB", "--read-timeout", "2")
    with Server(served_model, *more, environment={"SPECDEC_API_KEY": "s3cret"}) as started:
        yield started.ready()


def request(server: Server, method: str, path: str, **headers: str) -> tuple[int, str]:
    import urllib.request

    data = b"{}" if method == "POST" else None
    headers.setdefault("Content-Type", "application/json")
    return ask(urllib.request.Request(server.url + path, data, headers, method=method))


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("given", ["", "Bearer", "Bearer s3cre", "Bearer s3cret1", "Basic s3cret"])
def test_without_the_key_nothing_is_disclosed(
    locked: Server, method: str, path: str, given: str
) -> None:
    status, text = request(locked, method, path, **({"Authorization": given} if given else {}))
    assert status == 401
    assert "the API key is missing or wrong" in text
    assert "s3cret" not in text


def test_with_the_key(locked: Server) -> None:
    status, answer = locked.post("/v1/chat/completions", CHAT, {"Authorization": "bearer s3cret"})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 2)
    assert request(locked, "GET", "/health")[0] == 200


def test_two_keys_are_none(locked: Server) -> None:
    bearer, key = "Authorization: Bearer s3cret", "X-Api-Key: s3cret"
    for headers, status in (
        ([bearer] * 2, b" 401 "),
        ([key] * 2, b" 401 "),
        ([bearer, "X-Api-Key: other"], b" 401 "),
        ([key], b" 200 "),
        ([bearer, key], b" 200 "),
    ):
        with locked.connect("GET /v1/models HTTP/1.1", "Host: x", *headers) as raw:
            assert status in raw.recv(4096).split(b"\r\n")[0]


HOSTS = dict.fromkeys(["evil.example", "evil.example:80", "", "127.0.0.1.evil.example"], 403)
HOSTS |= dict.fromkeys(["localhost", "LOCALHOST:1", "127.0.0.1:8080", "[::1]:8080"], 200)


@pytest.mark.parametrize("host", HOSTS)
def test_without_a_key_only_this_machine_is_served(server: Server, host: str) -> None:
    """A page of another site may point its name at 127.0.0.1 (DNS rebinding)."""
    with server.connect("GET /v1/models HTTP/1.1", f"Host: {host}") as raw:
        assert status_of(raw) == HOSTS[host]


def test_a_form_of_another_site_is_no_request(server: Server) -> None:
    """Browsers send text/plain to other sites without asking; JSON they do not."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):  # "": a Blob of no type
        for tells in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            headers = {"Content-Type": kind, **tells}
            assert server.post("/v1/chat/completions", CHAT, headers)[0] == 400
    curl = {"Content-Type": "application/x-www-form-urlencoded"}  # what `curl -d` sends
    assert server.post("/v1/chat/completions", CHAT, curl)[0] == 200
    assert server.post("/v1/chat/completions", CHAT, {"Content-Type": ""})[0] == 200
    _, text = request(server, "GET", "/v1/models", Origin="http://evil.example")
    assert "access-control" not in text.lower()


KEY = "Authorization: Bearer s3cret"


def status_of(raw: Any) -> int:
    raw.settimeout(20)
    return int(raw.recv(4096).split(b" ")[1])


def test_a_body_that_is_too_long_is_not_read(locked: Server) -> None:
    head = ["POST /v1/completions HTTP/1.1", "Host: x", KEY, "Content-Type: application/json"]
    with locked.connect(*head, "Content-Length: 100000000") as raw:
        assert status_of(raw) == 413
    chunk = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
    with locked.connect(*head, "Transfer-Encoding: chunked", body=chunk * 5) as raw:
        assert status_of(raw) == 413


@pytest.mark.parametrize("head", ["nonsense", "GET /health HTTP/1.1\r\nHost: a\r\nHost : b"])
def test_what_is_no_http(server: Server, head: str) -> None:
    with server.connect(head) as raw:
        answer = b"".join(iter(lambda: raw.recv(4096), b""))  # read to its end: the server closes
    assert b" 400 " in answer.split(b"\r\n")[0]


def test_no_one_is_led_elsewhere(server: Server) -> None:
    """A redirect would go to whatever host the request names."""
    assert server.post("/v1/chat/completions/", CHAT)[0] == 404


def test_a_body_that_does_not_come(locked: Server) -> None:
    head = ["POST /v1/completions HTTP/1.1", "Host: x", KEY, "Content-Type: application/json"]
    begin = time.monotonic()
    with locked.connect(*head, "Content-Length: 10", body=b"{") as raw:
        assert status_of(raw) == 408
    assert time.monotonic() - begin < 15


def test_a_head_that_does_not_come(locked: Server) -> None:
    with locked.connect("GET /health HTTP/1.1", "Host: x") as raw:
        raw.settimeout(20)
        answer = b""
        while b"ready" not in answer:
            answer += raw.recv(4096)
        raw.sendall(b"GET /")  # in a second request
        assert raw.recv(4096) == b""


@pytest.mark.slow
def test_two_hundred_slow_connections(locked: Server) -> None:
    """Half of them send a head, half a body that never ends: others are served, these end."""
    post = ["POST /v1/completions HTTP/1.1", "Host: x", KEY, "Content-Type: application/json"]
    with ExitStack() as stack:
        raws = [
            stack.enter_context(locked.connect(*post, "Content-Length: 10", body=b"{"))
            for _ in range(100)
        ]
        for _ in range(100):
            raws.append(stack.enter_context(socket.create_connection(("127.0.0.1", locked.port))))
            raws[-1].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        status, _ = locked.post("/v1/chat/completions", CHAT, {"Authorization": "Bearer s3cret"})
        assert status == 200
        for i, raw in enumerate(raws):
            raw.settimeout(60)
            answer = b"".join(iter(lambda raw=raw: raw.recv(4096), b""))
            assert b" 408 " in answer if i < 100 else answer == b""


def test_many_and_long_headers(locked: Server) -> None:
    many = [f"X-{i}: 1" for i in range(1000)]
    with locked.connect("GET /health HTTP/1.1", "Host: x", *many) as raw:
        assert status_of(raw) == 431
    with socket.create_connection(("127.0.0.1", locked.port)) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nX: " + b"1" * 40_000)  # without an end
        assert status_of(raw) == 400
    with locked.connect("GET /health HTTP/1.1", "Host: x", "X: " + "1" * 100_000) as raw:
        assert status_of(raw) in (400, 431)  # uvicorn's, if it reads a part of it first


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"[" * 50_000,
        b'{"a":' * 10_000,
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 1}',
        b'{"\\ud800": 1, "messages": []}',
        b'{"messages": NaN}',
        b'{"temperature": Infinity, "messages": [{"role": "user", "content": "x"}]}',
        b'{"n": ' + b"9" * 5000 + b"}",
        b'{"max_tokens": 1e400, "messages": [{"role": "user", "content": "x"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "seed": 1.5}',
    ],
    ids=lambda body: repr(body[:24]),
)
def test_hostile_bodies(locked: Server, body: bytes) -> None:
    head = ["POST /v1/chat/completions HTTP/1.1", "Host: x", KEY, "Content-Type: application/json"]
    with locked.connect(*head, f"Content-Length: {len(body)}", body=body) as raw:
        raw.settimeout(20)
        answer = b""
        while b"}}" not in answer:
            answer += raw.recv(65536)
    assert 400 <= int(answer.split(b" ")[1]) < 500, answer
    assert b'"error"' in answer


def test_one_mistake_of_many_is_enough(server: Server) -> None:
    """Listing all errors of a megabyte took seconds, in which nobody else was served."""
    many = {"messages": [{"role": "user", "content": "x"}] * 5000}
    assert "at most 4096" in server.post("/v1/chat/completions", many)[1]["error"]["message"]
    talk = [{"role": "user", "content": "x"}]
    calls = [{"role": "assistant", "tool_calls": [1] * 5000}]
    for wrong, param in (
        ({"messages": [{}] * 5000}, "messages.0.role"),
        ({"messages": calls}, "messages.0.tool_calls.0"),
        ({"messages": talk, "modalities": ["x"] * 5000}, "modalities.0"),
    ):
        status, answer = server.post("/v1/chat/completions", wrong)
        assert (status, answer["error"]["param"]) == (400, param)
        with pytest.raises(ValidationError) as caught:
            ChatRequest.model_validate(wrong)
        assert caught.value.error_count() == 1


@pytest.mark.parametrize(
    "metadata", [{str(i): "" for i in range(17)}, {"a" * 65: ""}, {"a": "b" * 513}]
)
def test_metadata_are_few(server: Server, metadata: dict[str, str]) -> None:
    """Metadata stay in memory until the answer ends."""
    body = {"input": "x", "max_output_tokens": 1, "metadata": metadata}
    assert server.post("/v1/responses", body)[0] == 400


def test_log_probabilities_are_bounded(served_model: Path) -> None:
    """Eight sequences of 2 000 tokens with 20 each took 168 MiB besides the plan."""
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "temperature": 0}
    with Server(served_model, "--max-logprobs", "60") as server:
        server.ready()
        too_many = chat | {"top_logprobs": 2, "max_tokens": 21}
        status, log = server.post("/v1/chat/completions", too_many)
        assert status == 400
        assert "63 log-probabilities" in log["error"]["message"]
        fits = chat | {"top_logprobs": 2, "max_tokens": 10, "n": 2}
        assert server.post("/v1/chat/completions", fits)[0] == 200
        status, log = server.post("/v1/chat/completions", chat | {"top_logprobs": 2})
        assert status == 200
        assert log["usage"]["completion_tokens"] <= 20


def test_a_number_that_python_does_not_print(server: Server) -> None:
    """Python prints at most 4300 digits; numbers in a request are limited to as many."""
    body = {"prompt": ["a", "b"], "n": 10**4300 - 1}
    status, answer = server.post("/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "n")


FIELDS = st.sampled_from(
    "messages model temperature top_p n max_tokens stop seed presence_penalty frequency_penalty "
    "logit_bias stream stream_options top_k min_p repetition_penalty ignore_eos user metadata "
    "logprobs top_logprobs response_format tools tool_choice parallel_tool_calls store x".split()
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "required", "json_object", "function", "text", "add"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "function", "name", "json_schema", "schema", "role", "content"]
            )
            | st.text(max_size=3),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(FIELDS, VALUES, max_size=4))
def test_wrong_types_are_never_the_servers_fault(locked: Server, wrong: dict[str, Any]) -> None:
    body = {**CHAT, **wrong, "stream": False}
    status, answer = locked.post("/v1/chat/completions", body, {"Authorization": "Bearer s3cret"})
    assert status == 200 or 400 <= status < 500, (status, answer)
    if status != 200:
        assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_the_server_wrote_down_nothing_of_all_this(locked: Server) -> None:
    """Last in the file: no path, prompt or key of a request is in the server's log."""
    log = "".join(locked.lines)
    assert "error" not in log
    assert "Traceback" not in log
    assert "s3cret" not in log


@pytest.mark.parametrize("depth", [100, 250, 500, 900, 980, 1500, 10_000])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_deep_tools_are_taken_or_refused(server: Server, depth: int, choice: str) -> None:
    """Each library involved has its own depth limit."""
    if choice == "required":
        pytest.importorskip("llguidance")
    parameters = '{"a":' * depth + "{}" + "}" * depth
    text = json.dumps({**CHAT, "tool_choice": choice, "tools": [TOOL]}).replace(
        '"HERE"', parameters
    )
    status, answer = ask(Request(server.url + "/v1/chat/completions", text.encode(), JSON))
    assert status in (200, 400), answer
