"""Parser of tool calls in a model's answer.

Two forms are read: Hermes' and Qwen's, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`
anywhere in the text, and Llama 3's, where the whole answer is one JSON object with `name` and
`parameters`, or several with `;` between them. Anything else stays text.
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
    """Incremental parser that separates plain text from tool calls.

    Text is buffered from where a call may begin.

    Args:
        names: tools that may be called; a call of another one stays text.
        limit: maximum number of calls; further ones are dropped.
    """

    def __init__(self, names: Collection[str], limit: int | None = None) -> None:
        self._names, self._limit = names, limit
        self._pending = ""
        self._is_at_start, self._is_inside = True, False

    def push(self, text: str) -> str:
        """Add the next text; return the text that is certainly no call."""
        self._pending += text
        if self._is_inside:
            return ""
        start = self._pending.lstrip()
        if self._is_at_start and (not start or start[0] == "{" or _may_be_tag(start)):
            return ""  # perhaps Llama's form, known at the end
        start_of_call = self._pending.find(_BEGIN)
        if start_of_call >= 0:
            self._is_inside = True
            n_safe = len(self._pending[:start_of_call].rstrip())
        else:
            n_safe = len(_without_beginning(self._pending).rstrip())
        safe, self._pending = self._pending[:n_safe], self._pending[n_safe:]
        self._is_at_start = self._is_at_start and not safe
        return safe

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Return the rest of the text, and the calls."""
        pending, self._pending = self._pending, ""
        calls = self._tagged(pending) if _BEGIN in pending else self._bare(pending)
        if not calls:
            return pending, []
        before = pending[: pending.find(_BEGIN)].rstrip() if _BEGIN in pending else ""
        return before, calls[: self._limit]

    def _tagged(self, text: str) -> list[ToolCall]:
        blocks = [self._calls(block) for block in _BLOCK.findall(text)]
        return [call for calls in blocks for call in calls] if all(blocks) else []

    def _bare(self, text: str) -> list[ToolCall]:
        text = text.strip()
        return self._calls(text.removeprefix(_PYTHON_TAG)) if self._is_at_start else []

    def _calls(self, text: str) -> list[ToolCall]:
        """Return the calls of consecutive JSON objects; none if one of them is no call."""
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
    """Return the text without a suffix that may be the beginning of a call."""
    for n in range(min(len(_BEGIN) - 1, len(text)), 0, -1):
        if _BEGIN.startswith(text[-n:]):
            return text[:-n]
    return text
