"""Conformance cases of /v1/responses, as in llama.cpp's test_compat_oai_responses and vLLM's
test_response_api."""

from __future__ import annotations

import re
from typing import Any

from conformance import NONEMPTY, Case, refused
from conformance_tools import FUNCTION, PARAMETERS

Fields = dict[str, Any]


def responses(
    name: str, body: Fields, expect: Fields | None = None, status: int = 200, **more: Any
):
    given = {"input": "Say hi.", "max_output_tokens": 4, "temperature": 0, **body}
    return Case(f"responses: {name}", "/v1/responses", given, status, expect or {}, **more)


FLAT = {"type": "function", **FUNCTION}
CALL_ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
    {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Hm."}]},
    {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "4 degrees"},
]
KINDS = ["response.created", "response.in_progress", "response.output_item.added"]

RESPONSES = [
    responses("object", {}, {"object": "response", "id": re.compile("^resp_"), "error": None}),
    responses(
        "cut", {}, {"status": "incomplete", "incomplete_details.reason": "max_output_tokens"}
    ),
    responses(
        "message",
        {},
        {
            "output.0.type": "message",
            "output.0.content.0.type": "output_text",
            "output.0.content.0.text": NONEMPTY,
        },
    ),
    responses(
        "usage", {}, {"usage.output_tokens": 4, "usage.output_tokens_details.reasoning_tokens": int}
    ),
    responses("instructions", {"instructions": "Be brief."}, {"instructions": "Be brief."}),
    responses("items", {"input": CALL_ITEMS, "tools": [FLAT]}),
    responses(
        "output items go back",
        {
            "input": [
                {
                    "type": "message",
                    "role": "assistant",
                    "id": "m",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "x", "annotations": []}],
                },
                {"role": "user", "content": "y"},
            ]
        },
    ),
    responses(
        "an unknown item", {"input": [{"type": "computer_call"}]}, refused("input.0.type"), 400
    ),
    responses(
        "a call",
        {"tools": [FLAT], "tool_choice": "required", "max_output_tokens": 60},
        {
            "status": "completed",
            "output.0.type": "function_call",
            "output.0.name": "get_weather",
            "output.0.arguments": re.compile("city"),
        },
    ),
    responses(
        "a named call",
        {
            "tools": [FLAT],
            "tool_choice": {"type": "function", "name": "get_weather"},
            "max_output_tokens": 60,
        },
        {"output.0.type": "function_call"},
    ),
    responses(
        "kinds of tools that run elsewhere",
        {
            "tools": [
                {"type": "web_search"},
                {"type": "custom", "name": "apply_patch"},
                {"type": "local_shell"},
            ]
        },
    ),
    responses(
        "hints",
        {
            "store": True,
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["reasoning.encrypted_content"],
            "text": {"verbosity": "low"},
            "metadata": {"a": "b"},
        },
        {"metadata.a": "b", "store": False},
    ),
    responses(
        "a schema",
        {
            "max_output_tokens": 60,
            "text": {"format": {"type": "json_schema", "name": "a", "schema": PARAMETERS}},
        },
        {"output.0.content.0.text": re.compile("city")},
    ),
    responses(
        "an earlier response",
        {"previous_response_id": "resp_1"},
        refused("previous_response_id"),
        400,
    ),
    responses("in the background", {"background": True}, refused("background"), 400),
    responses(
        "an image",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"error.message": re.compile("input_image")},
        400,
    ),
    responses(
        "log-probabilities",
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"output.0.content.0.logprobs": lambda items: len(items) == 4},
    ),
    responses(
        "a stream",
        {"stream": True},
        {
            "": lambda events: [e["type"] for e in events[:3]] == KINDS,
            "-1.type": "response.incomplete",
            "-1.response.usage.output_tokens": 4,
        },
    ),
    responses(
        "numbers of events",
        {"stream": True},
        {"": lambda events: [e["sequence_number"] for e in events] == list(range(len(events)))},
    ),
    responses(
        "a streamed call",
        {"stream": True, "tools": [FLAT], "tool_choice": "required", "max_output_tokens": 60},
        {
            "-1.type": "response.completed",
            "-1.response.output.0.type": "function_call",
            "-2.type": "response.output_item.done",
            "-3.type": "response.function_call_arguments.done",
        },
    ),
    Case("responses: none is stored", "/v1/responses/resp_1", None, 404),
]
