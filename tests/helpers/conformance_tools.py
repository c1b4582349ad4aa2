"""Conformance cases of tools, as in llama.cpp's test_tool_call and vLLM's tool_use."""

from __future__ import annotations

import json
from typing import Any

from conformance import ABSENT, HI, NONEMPTY, Case, refused

Fields = dict[str, Any]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "Weather of a city", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
OTHER = {"type": "function", "function": {"name": "mcp__time:now"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
RESULTS = [
    *HI,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "4 degrees"},
]
DONE_CALL = {
    "choices.0.finish_reason": "tool_calls",
    "choices.0.message.content": None,
    "choices.0.message.tool_calls.0.function.name": "get_weather",
    "choices.0.message.tool_calls.0.function.arguments": lambda text: (
        json.loads(text)["city"] in ("Bern", "Oslo")
    ),
    "choices.0.message.tool_calls.0.id": NONEMPTY,
}


def tools(name: str, body: Fields, expect: Fields | None = None, status: int = 200, **more: Any):
    given = {"messages": HI, "max_tokens": 60, "temperature": 0, "tools": [TOOL], **body}
    return Case(f"tools: {name}", "/v1/chat/completions", given, status, expect or {}, **more)


def _joined_arguments(events: list[Any]) -> bool:
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    named = [call for call in calls if call["function"].get("name")]
    text = "".join(call["function"].get("arguments", "") for call in calls)
    return len(named) == 1 and "city" in json.loads(text)


TOOLS = [
    tools("required", {"tool_choice": "required"}, DONE_CALL),
    tools("any, as others say", {"tool_choice": "any"}, DONE_CALL),
    tools("named", {"tools": [TOOL, OTHER], "tool_choice": NAMED}, DONE_CALL),
    tools(
        "named that is none", {"tools": [OTHER], "tool_choice": NAMED}, refused("tool_choice"), 400
    ),
    tools(
        "required without tools",
        {"tools": None, "tool_choice": "required"},
        refused("tool_choice"),
        400,
    ),
    tools("auto without tools", {"tools": None, "tool_choice": "auto", "max_tokens": 2}),
    tools(
        "none", {"tool_choice": "none", "max_tokens": 2}, {"choices.0.message.tool_calls": ABSENT}
    ),
    tools(
        "auto", {"tool_choice": "auto", "max_tokens": 2}, {"choices.0.message.role": "assistant"}
    ),
    tools("names of MCP", {"tools": [OTHER], "max_tokens": 2}),
    tools("unknown kinds are skipped", {"tools": [TOOL, {"type": "web_search"}], "max_tokens": 2}),
    tools(
        "allowed_tools",
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [NAMED]},
            }
        },
        DONE_CALL,
    ),
    tools(
        "a stream",
        {"tool_choice": "required", "stream": True},
        {"-2.choices.0.finish_reason": "tool_calls", "": _joined_arguments},
    ),
    tools("results go back", {"messages": RESULTS, "max_tokens": 2}),
    tools(
        "arguments as an object",
        {
            "messages": [
                HI[0],
                {
                    **RESULTS[1],
                    "tool_calls": [{**CALL, "function": {"name": "a", "arguments": {}}}],
                },
                RESULTS[2],
            ],
            "max_tokens": 2,
        },
    ),
    tools(
        "empty arguments",
        {
            "messages": [
                HI[0],
                {
                    **RESULTS[1],
                    "tool_calls": [{**CALL, "function": {"name": "a", "arguments": ""}}],
                },
                RESULTS[2],
            ],
            "max_tokens": 2,
        },
    ),
    tools(
        "arguments are no JSON",
        {
            "messages": [
                HI[0],
                {
                    **RESULTS[1],
                    "tool_calls": [{**CALL, "function": {"name": "a", "arguments": "{"}}],
                },
            ]
        },
        refused("messages[1].tool_calls"),
        400,
    ),
    tools(
        "a function is missing", {"tools": [{"type": "function"}]}, refused("tools.0.function"), 400
    ),
    tools(
        "with a format",
        {"tool_choice": "required", "response_format": {"type": "json_object"}},
        refused("response_format"),
        400,
    ),
    tools("one at a time", {"tool_choice": "required", "parallel_tool_calls": False}, DONE_CALL),
]
