"""From a body to a request: the reported error, and the field's name."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("starlette")

from specdec.serve.errors import ApiError
from specdec.serve.requests import ChatRequest, CompletionRequest, read_request

TALK = [{"role": "user", "content": "hi"}]
PART = {"type": "text", "txt": 1}
FORMAT = {"type": "json_schema", "json_schema": {"schema": {}}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [PART]}]}, "messages.0.content.0.text"),
        ({"messages": TALK, "stop": ["a", 5]}, "stop.1"),
        ({"messages": TALK, "tool_choice": "what"}, "tool_choice"),
        ({"messages": TALK, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"messages": TALK, "response_format": FORMAT}, "response_format.json_schema.name"),
        ({"messages": TALK, "response_format": {"type": "text", "x": 1}}, "response_format.x"),
        ({"messages": TALK, "response_format": {"type": "xml"}}, "response_format"),
        ({"messages": TALK, "logit_bias": {"a": 1}}, "logit_bias"),
        ({"messages": TALK, "nonsense": 1}, "nonsense"),
        ({"messages": TALK, "prompt": "x"}, "prompt"),
        ({"messages": TALK, "name": 1}, "name"),
        ({"messages": [{"role": "user", "content": "x", "type": 1}]}, "messages.0.type"),
        ({"messages": TALK, "stream_options": {"usage": True}}, "stream_options.usage"),
    ],
    ids=str,
)
def test_an_error_names_the_field(body: dict[str, Any], param: str) -> None:
    """Pydantic's names for the alternatives of a value used to be part of it."""
    with pytest.raises(ApiError) as caught:
        read_request(json.dumps(body).encode(), ChatRequest)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(param)


def test_a_prompt_of_two_kinds() -> None:
    with pytest.raises(ApiError) as caught:
        read_request(b'{"prompt": [1, "a"]}', CompletionRequest)
    assert caught.value.param in ("prompt.0", "prompt.1")


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b'{"n": ' + b"9" * 5000])
def test_no_json(body: bytes) -> None:
    with pytest.raises(ApiError, match="no JSON"):
        read_request(body, ChatRequest)


@pytest.mark.parametrize("body", [b"null", b"[]", b'"x"', b"1"])
def test_no_object(body: bytes) -> None:
    with pytest.raises(ApiError, match="send a JSON object"):
        read_request(body, ChatRequest)
