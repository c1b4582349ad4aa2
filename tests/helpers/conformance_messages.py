"""Conformance cases of /v1/messages, as in llama.cpp's test_compat_anthropic."""

from __future__ import annotations

import re
from typing import Any

from conformance import HI, NONEMPTY, Case
from conformance_tools import PARAMETERS

Fields = dict[str, Any]


def messages(name: str, body: Fields, expect: Fields | None = None, status: int = 200, **more: Any):
    given = {"messages": HI, "max_tokens": 4, "temperature": 0, "model": "claude", **body}
    return Case(f"messages: {name}", "/v1/messages", given, status, expect or {}, **more)


ANTHROPIC_TOOL = {"name": "get_weather", "description": "w", "input_schema": PARAMETERS}
BLOCKS = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
    },
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t", "name": "get_weather", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "4"}]},
            {"type": "text", "text": "y"},
        ],
    },
]
STARTS = ["message_start", "content_block_start", "content_block_delta"]
WRONG = {"type": "error", "error.type": "invalid_request_error"}

MESSAGES = [
    messages(
        "message",
        {},
        {
            "type": "message",
            "role": "assistant",
            "id": re.compile("^msg_"),
            "content.0.type": "text",
            "content.0.text": NONEMPTY,
        },
    ),
    messages("cut", {}, {"stop_reason": "max_tokens", "stop_sequence": None}),
    messages(
        "usage",
        {},
        {"usage.output_tokens": 4, "usage.input_tokens": int, "usage.cache_read_input_tokens": int},
    ),
    messages(
        "stop_sequences",
        {"max_tokens": 60, "stop_sequences": list(' \neatosi(>_#".=-')},
        {"stop_reason": "stop_sequence", "stop_sequence": re.compile(r"(?s)^.$")},
    ),
    messages("system", {"system": "Be brief."}),
    messages(
        "system in blocks",
        {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]},
    ),
    messages("blocks", {"messages": BLOCKS, "tools": [ANTHROPIC_TOOL]}),
    messages(
        "hints",
        {
            "metadata": {"user_id": "u"},
            "service_tier": "auto",
            "context_management": {"edits": []},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        },
    ),
    messages("thinking off", {"thinking": {"type": "disabled"}}),
    messages("prefill", {"messages": [*HI, {"role": "assistant", "content": "Well"}]}),
    messages(
        "a call",
        {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "any"}, "max_tokens": 60},
        {
            "stop_reason": "tool_use",
            "content.0.type": "tool_use",
            "content.0.name": "get_weather",
            "content.0.input.city": re.compile("Bern|Oslo"),
        },
    ),
    messages(
        "a named call",
        {
            "tools": [ANTHROPIC_TOOL],
            "tool_choice": {"type": "tool", "name": "get_weather"},
            "max_tokens": 60,
        },
        {"stop_reason": "tool_use"},
    ),
    messages(
        "tools that run elsewhere",
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    ),
    messages(
        "an image",
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "source": {"type": "base64"}}]}
            ]
        },
        {**WRONG, "error.message": re.compile("image")},
        400,
    ),
    messages(
        "no messages", {"messages": []}, {**WRONG, "error.message": re.compile("messages")}, 400
    ),
    messages(
        "a stream",
        {"stream": True},
        {
            "": lambda events: [e["type"] for e in events[:3]] == STARTS,
            "0.message.usage.input_tokens": int,
            "-1.type": "message_stop",
            "-2.delta.stop_reason": "max_tokens",
            "-2.usage.output_tokens": 4,
        },
    ),
    messages(
        "a streamed call",
        {
            "stream": True,
            "tools": [ANTHROPIC_TOOL],
            "tool_choice": {"type": "any"},
            "max_tokens": 60,
        },
        {
            "1.content_block.type": "tool_use",
            "2.delta.type": "input_json_delta",
            "-2.delta.stop_reason": "tool_use",
        },
    ),
    messages("no max_tokens", {"max_tokens": None, "stop_sequences": ["e"]}),
    Case(
        "messages: count_tokens",
        "/v1/messages/count_tokens",
        {"messages": HI, "system": "x", "tools": [ANTHROPIC_TOOL]},
        200,
        {"input_tokens": lambda n: n > 3},
    ),
]
