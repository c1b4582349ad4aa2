"""Conformance cases of /v1/chat/completions.

Written anew from what llama.cpp's tools/server/tests/unit (test_chat_completion, test_template,
test_basic) and vLLM's tests/entrypoints/openai (test_chat, test_chat_echo, test_chat_template,
test_guided_decoding) assert.
"""

from __future__ import annotations

import json
import re
from typing import Any

from conformance import ABSENT, HI, NONEMPTY, SYSTEM, Case, refused

PATH = "/v1/chat/completions"
Fields = dict[str, Any]


def chat(name: str, body: Fields, expect: Fields | None = None, status: int = 200, **more: Any):
    given = {"messages": SYSTEM, "max_tokens": 4, "temperature": 0, **body}
    return Case(f"chat: {name}", PATH, given, status, expect or {}, **more)


def _content(events: list[Any]) -> str:
    return "".join(
        choice["delta"].get("content") or ""
        for event in events
        if event != "[DONE]"
        for choice in event["choices"]
    )


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
CONTENT, REASON = "choices.0.message.content", "choices.0.finish_reason"
IS_OF_SCHEMA = {CONTENT: lambda actual: json.loads(actual).keys() == {"ok"}}
LONG = {"max_tokens": 40}
YES_NO = {"choices.0.text": re.compile("^(yes|no)$")}
PART = {"type": "text", "text": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}

CHATS = [
    chat("message", {}, {"choices.0.message.role": "assistant", CONTENT: str, REASON: "length"}),
    chat("object and id", {}, {"object": "chat.completion", "id": re.compile("^chatcmpl-")}),
    chat("usage", {}, {"usage.completion_tokens": 4, "usage.prompt_tokens": int}),
    chat("fingerprint", {}, {"system_fingerprint": NONEMPTY}),
    chat(
        "prompt_logprobs",
        {"prompt_logprobs": 1},
        {"prompt_logprobs.0": None, "prompt_logprobs.1": dict, "choices.0.prompt_logprobs": ABSENT},
    ),
    chat("no prompt_logprobs unless asked", {}, {"prompt_logprobs": ABSENT}),
    chat("cached tokens", {}, {"usage.prompt_tokens_details.cached_tokens": int}),
    chat("max_completion_tokens", {"max_completion_tokens": 2}, {"usage.completion_tokens": 2}),
    chat("no messages", {"messages": []}, refused("messages", "at least 1"), 400),
    chat("messages are no list", {"messages": "hi"}, refused("messages"), 400),
    chat("a message is no object", {"messages": ["hi"]}, refused("messages.0"), 400),
    chat("no role", {"messages": [{"content": "x"}]}, refused("messages.0.role"), 400),
    chat("no content", {"messages": [{"role": "user"}]}, refused("messages[0]"), 400),
    chat(
        "an assistant without content",
        {"messages": [{"role": "assistant"}]},
        refused("messages[0]"),
        400,
    ),
    chat("a number as content", {"messages": [{"role": "user", "content": 1}]}, status=400),
    chat("parts", {"messages": [{"role": "user", "content": [PART, PART]}]}),
    chat(
        "hints in parts",
        {"messages": [{"role": "user", "content": [{**PART, "cache_control": {}}]}]},
    ),
    chat(
        "an image",
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        {"error.param": "messages[0].content[0]"},
        400,
    ),
    chat("developer", {"messages": [{"role": "developer", "content": "x"}, *HI]}),
    chat("a role of one's own", {"messages": [{"role": "critic", "content": "x"}]}),
    chat(
        "hints",
        {
            "store": True,
            "metadata": {"a": "b"},
            "service_tier": "auto",
            "user": "u",
            "verbosity": "low",
            "reasoning_effort": "high",
            "prompt_cache_key": "k",
            "safety_identifier": "s",
        },
    ),
    chat("functions of null", {"functions": None, "function_call": None}),
    chat("functions", {"functions": [{"name": "f"}]}, refused("functions", "tools"), 400),
    chat("an unknown hint", {"frobnicate": {"a": 1}}),
    chat("a misspelt field", {"max_token": 4}, refused("max_token", "max_tokens"), 400),
    chat("a temperature below 0", {"temperature": -1}, refused("temperature", "at least 0"), 400),
    chat("top_p of 2", {"top_p": 2}, refused("top_p", "at most 1"), 400),
    chat("n of 0", {"n": 0}, refused("n", "at least 1"), 400),
    chat("n", {"n": 2}, {"choices.1.index": 1}),
    chat("top_logprobs without logprobs", {"top_logprobs": 2}, refused("top_logprobs"), 400),
    chat(
        "logprobs",
        {"logprobs": True, "top_logprobs": 2},
        {"choices.0.logprobs.content.0.top_logprobs": lambda t: len(t) == 2},
    ),
    chat("no logprobs unless asked", {}, {"choices.0.logprobs": None}),
    chat(
        "json_object",
        {**LONG, "response_format": {"type": "json_object"}, "max_tokens": 1},
        {REASON: "length"},
    ),
    chat(
        "json_object with a schema",
        {**LONG, "response_format": {"type": "json_object", "schema": SCHEMA}},
        IS_OF_SCHEMA,
    ),
    chat(
        "json_schema",
        {
            **LONG,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA},
            },
        },
        IS_OF_SCHEMA,
    ),
    chat(
        "json_schema without a name",
        {**LONG, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        IS_OF_SCHEMA,
    ),
    chat("a format of text", {"response_format": {"type": "text"}}),
    chat(
        "an unknown format", {"response_format": {"type": "sound"}}, refused("response_format"), 400
    ),
    chat(
        "a broken schema",
        {"response_format": {"type": "json_object", "schema": {"type": "what"}}},
        {"error.message": ...},
        400,
    ),
    chat("guided_json", {**LONG, "guided_json": SCHEMA}, IS_OF_SCHEMA),
    chat("guided_json as text", {**LONG, "guided_json": json.dumps(SCHEMA)}, IS_OF_SCHEMA),
    chat("structured_outputs", {**LONG, "structured_outputs": {"json": SCHEMA}}, IS_OF_SCHEMA),
    chat("grammar", {**LONG, "grammar": 'root ::= "a"+ "b"'}, {CONTENT: re.compile("^a+b?$")}),
    chat(
        "a stream",
        {"stream": True},
        {
            "0.choices.0.delta.role": "assistant",
            "-1": "[DONE]",
            "-2.choices.0.finish_reason": "length",
            "": lambda events: len({e["id"] for e in events[:-1]}) == 1,
        },
    ),
    chat("a stream has the text", {"stream": True}, {"": lambda events: bool(_content(events))}),
    chat(
        "usage of a stream",
        {"stream": True, "stream_options": {"include_usage": True}},
        {"-2.usage.completion_tokens": 4},
    ),
    chat("stream options without a stream", {"stream_options": {"include_usage": True}}),
    chat("an error before a stream", {"stream": True, "n": 0}, refused("n"), 400),
    chat(
        "a prompt beyond the context",
        {"messages": [{"role": "user", "content": "word " * 900}]},
        {"error.code": "context_length_exceeded"},
        400,
    ),
    chat("prefill", {"messages": [*HI, {"role": "assistant", "content": "Well"}]}, {CONTENT: str}),
    chat(
        "continue_final_message",
        {
            "messages": [*HI, {"role": "assistant", "content": "Well"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    ),
    chat(
        "continue_final_message of a user",
        {"continue_final_message": True},
        refused("continue_final_message"),
        400,
    ),
    chat(
        "both of them",
        {
            "messages": [*HI, {"role": "assistant", "content": "Well"}],
            "continue_final_message": True,
            "add_generation_prompt": True,
        },
        refused("continue_final_message"),
        400,
    ),
    chat("chat_template_kwargs", {"chat_template_kwargs": {"enable_thinking": False, "x": [1]}}),
    chat(
        "reserved kwargs",
        {"chat_template_kwargs": {"messages": []}},
        refused("chat_template_kwargs.messages"),
        400,
    ),
    chat("enable_thinking", {"enable_thinking": False, "thinking_budget_tokens": 0}),
    chat("a budget of thinking", {"thinking_budget_tokens": 50}),
    chat("vLLM's budget of thinking", {"thinking_token_budget": 50}),
    chat("text only", {"modalities": ["text"]}),
    chat("sound", {"modalities": ["text", "audio"]}, refused("modalities.1"), 400),
    chat("no JSON", {}, {"error.message": "the body is no JSON"}, 400),
]
CHATS[-1] = Case("chat: no JSON", PATH, "{", 400, {"error.message": "the body is no JSON"})
