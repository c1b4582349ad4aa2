"""Calls of tools in a model's answer.

Two forms are read: Hermes' and Qwen's, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`
anywhere in the text, and Llama 3's, where the whole answer is one JSON object with `name` and
`parameters`, or several with `;` between them. What is neither stays text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection
from typing import Any

from specdec.serve.responses import FunctionCall, ToolCall

_BEGIN, _END = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_BLOCK = re.compile(rf"{_BEGIN}(.*?)(?:{_END}|\Z)", re.DOTALL)
_DECODER = json.JSONDecoder()


class ToolCallParser:
    """Text in, text for the reader out; the calls at the end.

    Text is held back from where a call may begin.

    Args:
        names: of the tools that may be called; a call of another one stays text.
        most: calls that are taken; what follows is dropped.
    """

    def __init__(self, names: Collection[str], limit: int | None = None) -> None:
        self._names, self._limit = names, limit
        self._pinned = ""
        self._is_at_start, self._is_inside = True, False

    def push(self, text: str) -> str:
        """Take the next piece; the text that is surely no call."""
        self._pinned += text
        if self._is_inside:
            return ""
        start = self._pinned.lstrip()
        if self._is_at_start and (not start or start[0] == "{" or _may_be_tag(start)):
            return ""  # perhaps Llama's form, known at the end
        result = self._pinned.find(_BEGIN)
        if result >= 0:
            self._is_inside = True
            n_safe = len(self._pinned[:result].rstrip())
        else:
            n_safe = len(_without_beginning(self._pinned).rstrip())
        safe, self._pinned = self._pinned[:n_safe], self._pinned[n_safe:]
        self._is_at_start = self._is_at_start and not safe
        return safe

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The rest of the text, and the calls."""
        pinned, self._pinned = self._pinned, ""
        calls = self._tagged(pinned) if _BEGIN in pinned else self._bare(pinned)
        if not calls:
            return pinned, []
        before = pinned[: pinned.find(_BEGIN)].rstrip() if _BEGIN in pinned else ""
        return before, calls[: self._limit]

    def _tagged(self, text: str) -> list[ToolCall]:
        result = [self._calls(block) for block in _BLOCK.findall(text)]
        return [call for calls in result for call in calls] if all(result) else []

    def _bare(self, text: str) -> list[ToolCall]:
        text = text.strip()
        return self._calls(text.removeprefix(_PYTHON_TAG)) if self._is_at_start else []

    def _calls(self, text: str) -> list[ToolCall]:
        """Of JSON objects behind each other; none where one of them is no call."""
        calls, at, text = [], 0, text.strip()
        while at < len(text):
            try:
                value, at = _DECODER.raw_decode(text, at)
            except (ValueError, RecursionError):
                return []
            call = self._call(value)
            if call is None:
                return []
            calls.append(call)
            at += len(text) - at - len(text[at:].lstrip("; \t\r\n"))
        return calls

    def _call(self, value: Any) -> ToolCall | None:
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if not isinstance(arguments, str):
            return None
        function = FunctionCall(name=name, arguments=arguments)
        return ToolCall(id=f"call_{secrets.token_hex(12)}", type="function", function=function)


def _may_be_tag(start: str) -> bool:
    return start.startswith(_PYTHON_TAG) or _PYTHON_TAG.startswith(start)


def _without_beginning(text: str) -> str:
    """The text without an end that may be the beginning of a call."""
    for n in range(min(len(_BEGIN) - 1, len(text)), 0, -1):
        if _BEGIN.startswith(text[-n:]):
            return text[:-n]
    return text
