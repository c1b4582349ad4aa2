"""Adaptation of messages and tools to what a chat template shows the model.

A template that knows nothing of tools, of calls or of results is given them as text, so that
nothing is dropped in silence.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec.dialogue.formats import CallIds, ToolFormat
from specdec.dialogue.tool_formats import HERMES
from specdec.dialogue.traits import TemplateTraits

Messages = list[dict[str, Any]]
_LETTERS = string.ascii_letters + string.digits
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")
_KIMI_ID = re.compile(r"functions\.[^:]+:\d+")
_TELLING = """# Tools

You may call one or more of these functions, which are described in JSON:
{functions}

To call one, write this, with its name and its arguments as a JSON object:
{example}
Then end your answer: the result is given to you in <tool_response></tool_response>."""


def adapted(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    traits: TemplateTraits,
    form: ToolFormat,
) -> tuple[Messages, Sequence[Mapping[str, Any]]]:
    """Return (messages, tools) for a template with these traits.

    messages: contents are texts or null, arguments of calls are objects.
    form: the format in which the model writes calls.
    """
    result = _with_ids([dict(message) for message in messages], form.ids)
    if not traits.takes_many_calls and traits.shows_calls:
        result = list(_one_call_each(result))
    result = [_adapted_message(message, traits, form) for message in result]
    if not traits.shows_results:
        result = _joined_results(result)
    if not tools or traits.shows_tools:
        return result, tools
    return _with_system(result, _telling(tools, form), traits), ()


# --- ids ---------------------------------------------------------------------------------------


def _with_ids(messages: Messages, kind: CallIds) -> Messages:
    """Give each call an id of the format's kind, and each result that of its call, and its name."""
    unanswered: list[tuple[str, str, str]] = []  # (the client's id, the format's, name)
    count = 0
    for message in messages:
        if message.get("tool_calls"):
            unanswered, calls = [], []
            for call in message["tool_calls"]:
                name = str(call["function"]["name"])
                given = str(call.get("id") or "")
                own = _call_id(given, name, count, kind)
                unanswered.append((given, own, name))
                calls.append({**call, "id": own})
                count += 1
            message["tool_calls"] = calls
        elif message["role"] == "tool":
            given = str(message.get("tool_call_id") or "")
            match = next((each for each in unanswered if given and each[0] == given), None)
            match = match or (unanswered[0] if unanswered else None)
            if match is not None:
                unanswered.remove(match)
                message["tool_call_id"] = match[1]
                message.setdefault("name", match[2])
    return messages


def _call_id(given: str, name: str, index: int, kind: CallIds) -> str:
    if kind == "mistral" and not _MISTRAL_ID.fullmatch(given):
        digest = hashlib.sha256((given or f"{name}:{index}").encode()).digest()
        return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest[:9])
    if kind == "kimi" and not _KIMI_ID.fullmatch(given):
        return f"functions.{name}:{index}"
    return given or f"call_{index}"


# --- calls and results -------------------------------------------------------------------------


def _one_call_each(messages: Messages) -> Iterator[dict[str, Any]]:
    """Yield messages with one call each, the call's result directly behind it."""
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            yield message
            continue
        end = at
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        results = messages[at:end]
        at = end
        for i, call in enumerate(calls):
            content = message.get("content") if i == 0 else None
            yield {**message, "content": content, "tool_calls": [call]}
            own = [each for each in results if each.get("tool_call_id") == call["id"]]
            yield from own
            results = [each for each in results if each not in own]
        yield from results


def _adapted_message(
    message: dict[str, Any], traits: TemplateTraits, form: ToolFormat
) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if message.get("content") is None and not (calls and traits.takes_null):
        message["content"] = ""
    if calls and not traits.shows_calls:
        del message["tool_calls"]
        written = [_written(call["function"], form) for call in calls]
        parts = [message["content"] or "", *written]
        message["content"] = "\n".join(part for part in parts if part)
    elif calls and traits.wants_text_arguments:
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _json(call["function"])}}
            for call in calls
        ]
    if message["role"] == "tool" and not traits.shows_results:
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content, "is_result": True}
    return message


def _joined_results(messages: Messages) -> Messages:
    """Join neighbouring messages of the user that came from results: templates want turns."""
    result: Messages = []
    for message in messages:
        is_result = message.pop("is_result", False)
        if is_result and result and result[-1]["role"] == "user":
            result[-1]["content"] += f"\n{message['content']}"
        elif message["role"] == "user" and result and result[-1].get("is_result"):
            result[-1]["content"] += f"\n\n{message['content']}"
        else:
            result.append({**message, "is_result": True} if is_result else message)
    for message in result:
        message.pop("is_result", None)
    return result


def _json(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments")
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _written(function: Mapping[str, Any], form: ToolFormat) -> str:
    example = form.example or HERMES.example
    return example.format(name=function["name"], arguments=_json(function))


# --- tools as text -----------------------------------------------------------------------------


def _telling(tools: Sequence[Mapping[str, Any]], form: ToolFormat) -> str:
    functions = "\n".join(json.dumps(tool.get("function"), ensure_ascii=False) for tool in tools)
    example = (form.example or HERMES.example).format(name="NAME", arguments="{...}")
    return _TELLING.format(functions=functions, example=example)


def _with_system(messages: Messages, text: str, traits: TemplateTraits) -> Messages:
    """Return the messages with a text in the system message, else in the user's first one."""
    first = messages[0] if messages else {}
    if first.get("role") == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    if traits.takes_system:
        return [{"role": "system", "content": text}, *messages]
    for i, message in enumerate(messages):
        if message["role"] == "user":
            content = f"{text}\n\n{message['content']}"
            return [*messages[:i], {**message, "content": content}, *messages[i + 1 :]]
    return [{"role": "user", "content": text}, *messages]
