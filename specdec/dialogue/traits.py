"""Traits of a chat template that are found by rendering short conversations with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from specdec.text.chat_format import ChatTemplateError
from specdec.text.chat_template import render_chat

_NAME, _VALUES, _RESULTS = "probe_function", ("probe-one", "probe-two"), ("result-1", "result-2")
_USER = {"role": "user", "content": "probe-question"}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"value": {"type": "string", "description": "Any."}},
            "required": ["value"],
        },
    },
}


@dataclass(frozen=True)
class TemplateTraits:
    """Traits of a template: how it shows tools and calls.

    shows_tools: tells the model of them. shows_calls, shows_results: writes earlier ones out.
    takes_many_calls: of one message. takes_null: content may be null beside calls.
    wants_text_arguments: arguments have to be JSON rather than an object.
    takes_system: a system message may come first.
    """

    shows_tools: bool = False
    shows_calls: bool = False
    shows_results: bool = False
    takes_many_calls: bool = True
    takes_null: bool = False
    wants_text_arguments: bool = False
    takes_system: bool = True


PLAIN_TRAITS = TemplateTraits()


@lru_cache(maxsize=8)
def traits_of(template: str, special_tokens: str) -> TemplateTraits:
    """Return the traits of a template. special_tokens: JSON of those under templates' names."""
    probe = _Probe(template, json.loads(special_tokens))
    with_tools = probe([_USER], [_TOOL])
    shows_tools = bool(with_tools) and with_tools != probe([_USER])
    tools = [_TOOL] if shows_tools else []
    takes_system = "probe-system" in probe([{"role": "system", "content": "probe-system"}, _USER])
    basic = TemplateTraits(shows_tools=shows_tools, takes_system=takes_system)
    # The first form that shows most is taken; null content is preferred to an empty one.
    best, best_score = basic, -1
    for as_text, content in product((False, True), (None, "")):
        text = probe(_talk(1, content, as_text), tools)
        is_null_written = content is None and "None" in text
        shows_calls = _NAME in text.partition("probe-question")[2] and _VALUES[0] in text
        shows_results = _RESULTS[0] in text
        score = 0 if is_null_written else 2 * shows_calls + shows_results
        if score > best_score:
            many = probe(_talk(2, content, as_text), tools)
            best_score, best = (
                score,
                TemplateTraits(
                    shows_tools=shows_tools,
                    shows_calls=shows_calls,
                    shows_results=shows_results,
                    takes_many_calls=all(value in many for value in (*_VALUES, *_RESULTS)),
                    takes_null=content is None,
                    wants_text_arguments=as_text,
                    takes_system=takes_system,
                ),
            )
    return best


class _Probe:
    """Rendering that gives no text where the template fails."""

    def __init__(self, template: str, special_tokens: Mapping[str, Any]) -> None:
        self._template, self._special_tokens = template, special_tokens

    def __call__(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> str:
        try:
            return render_chat(self._template, messages, self._special_tokens, tools)
        except ChatTemplateError:
            return ""


def _talk(n: int, content: str | None, as_text: bool) -> list[dict[str, Any]]:
    """Return a conversation with n calls and their results."""
    ids = [f"abcdefg0{i}" for i in range(n)]  # nine characters, as Mistral's templates demand
    arguments = [{"value": value} for value in _VALUES[:n]]
    calls = [
        {
            "id": ids[i],
            "type": "function",
            "function": {
                "name": _NAME,
                "arguments": json.dumps(arguments[i]) if as_text else arguments[i],
            },
        }
        for i in range(n)
    ]
    results = [
        {"role": "tool", "tool_call_id": ids[i], "name": _NAME, "content": _RESULTS[i]}
        for i in range(n)
    ]
    return [_USER, {"role": "assistant", "content": content, "tool_calls": calls}, *results]
