"""From a body to a request: the reported error, and the field's name."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("starlette")

from specdec.checks import ConfigError
from specdec.serve.api.chat import ChatRequest
from specdec.serve.api.completions import CompletionRequest
from specdec.serve.api.constraints import constraint_fields
from specdec.serve.api.reading import read_request
from specdec.serve.errors import ApiError

TALK = [{"role": "user", "content": "hi"}]
PART = {"text": "x"}
FORMAT = {"type": "json_schema", "json_schema": {"schema": 1}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [PART]}]}, "messages.0.content.0.type"),
        ({"messages": TALK, "stop": ["a", 5]}, "stop.1"),
        ({"messages": TALK, "tool_choice": "what"}, "tool_choice"),
        ({"messages": TALK, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"messages": TALK, "response_format": FORMAT}, "response_format.json_schema.schema"),
        ({"messages": TALK, "response_format": {"type": "xml"}}, "response_format"),
        ({"messages": TALK, "logit_bias": {"a": 1}}, "logit_bias"),
        ({"messages": TALK, "stop": ["x"] * 20}, "stop"),
        ({"messages": TALK, "max_token": 3}, "max_token"),
        ({"messages": TALK, "maxTokens": 3}, "maxTokens"),
        ({"messages": TALK, "temprature": 0}, "temprature"),
        ({"messages": TALK, "suffix": "x"}, "suffix"),
        ({"messages": TALK, "mirostat": 2}, "mirostat"),
        ({"messages": TALK, "functions": [{"name": "f"}]}, "functions"),
        ({"messages": TALK, "logit_bias": [[1]]}, "logit_bias.0"),
    ],
    ids=str,
)
def test_an_error_names_the_field(body: dict[str, Any], param: str) -> None:
    """Pydantic's names for the alternatives of a value used to be part of it."""
    with pytest.raises(ApiError) as caught:
        read_request(json.dumps(body).encode(), ChatRequest)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(param)


@pytest.mark.parametrize(
    "hint",
    [
        {"store": True},
        {"metadata": {"a": 1}},
        {"service_tier": "flex"},
        {"verbosity": "low"},
        {"functions": None},
        {"suffix": ""},
        {"mirostat": 0},
        {"prompt_cache_retention": "24h"},
        {"a_hint_of_tomorrow": {"x": 1}},
        {"stream_options": {"include_obfuscation": False}},
        {"response_format": {"type": "text", "x": 1}},
        {"messages": [{"role": "user", "content": "x", "cache_control": {"type": "ephemeral"}}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]},
    ],
    ids=str,
)
def test_a_hint_is_ignored(hint: dict[str, Any]) -> None:
    assert read_request(json.dumps({"messages": TALK, **hint}).encode(), ChatRequest).messages


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("stop", ["x"] * 20, "20 given, this server takes at most 16"),
        ("stop", ["x" * 1000], "longer than 256 characters"),
        ("prompt", [-1], "must be at least 0"),
        ("prompt", [], "needs at least 1"),
        ("logprobs", 100, "must be at most 20"),
        ("top_p", 0, "must be above 0"),
    ],
)
def test_an_error_tells_the_limit(field: str, value: Any, limit: str) -> None:
    """It used to tell the type that another kind of value would have."""
    with pytest.raises(ApiError, match=limit):
        read_request(json.dumps({"prompt": "x", field: value}).encode(), CompletionRequest)


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


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}},
         "response_format"),
        ({"json_schema": {}}, "json_schema"),
        ({"guided_choice": ["a", "b"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    ],
    ids=str,
)  # fmt: skip
def test_a_missing_extra_is_reported_with_the_field_that_was_sent(
    fields: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    request = ChatRequest.model_validate({"messages": TALK, **fields})
    with pytest.raises(ConfigError) as caught:
        constraint_fields(request)
    assert str(caught.value) == f"{named} needs llguidance: pip install 'specdec-stream[grammar]'"
