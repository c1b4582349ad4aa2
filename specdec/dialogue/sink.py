"""Collector of the deltas of an output."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping

from specdec.dialogue.deltas import (
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallCut,
    joined,
)
from specdec.dialogue.formats import ToolFormat
from specdec.dialogue.schemas import ArgumentTypes
from specdec.dialogue.values import escaped

_LETTERS = string.ascii_letters + string.digits
_MISTRAL_LENGTH = 9
_KIMI = re.compile(r"(?:functions\.)?(?P<name>.+?):\d+")
_NAMESPACE = "functions."


class DeltaSink:
    """Deltas since the last `take`.

    names: control tokens by the characters that stand for them in the parser's text.
    form: None if there are no calls. max_calls: further ones are dropped; None is any number.
    """

    def __init__(
        self,
        types: ArgumentTypes,
        form: ToolFormat | None,
        names: Mapping[int, str],
        max_calls: int | None,
    ) -> None:
        self._types, self._max_calls = types, max_calls
        self._ids = "call" if form is None else form.ids
        self._ignored = () if form is None else form.ignored_names
        self._names, self._escaped = names, {i: escaped(name) for i, name in names.items()}
        self._deltas: list[Delta] = []
        self._index: int | None = None
        self._is_dropped = False
        self.num_calls = 0

    def take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return joined(deltas)

    def text(self, text: str) -> None:
        self._add(TextDelta, text)

    def reasoning(self, text: str) -> None:
        self._add(ReasoningDelta, text)

    def _add(self, kind: Callable[[str], Delta], text: str) -> None:
        text = text.translate(self._names)
        if text:
            self._deltas.append(kind(text))

    # --- a call ----------------------------------------------------------------------------------

    @property
    def is_in_call(self) -> bool:
        return self._index is not None

    def begin(self, name: str, call_id: str | None = None) -> None:
        self._index = self.num_calls
        is_over = self._max_calls is not None and self._index >= self._max_calls
        self._is_dropped = is_over or name in self._ignored
        if self._is_dropped:
            return
        self.num_calls += 1
        name = name.translate(self._names)
        if self._ids == "kimi" and (match := _KIMI.fullmatch(name)):
            name, call_id = match["name"], call_id or name
        if name not in self._types and name.removeprefix(_NAMESPACE) in self._types:
            name = name.removeprefix(_NAMESPACE)
        self._deltas.append(ToolCallBegin(self._index, call_id or self._new_id(name), name))

    def arguments(self, text: str) -> None:
        assert self._index is not None
        if not self._is_dropped:
            text = text.translate(self._escaped)
            self._deltas.append(ToolCallArguments(self._index, text))

    def end(self) -> None:
        self._index = None

    def cut(self, note: str) -> None:
        """End a call that is incomplete."""
        if self._index is None or not self._is_dropped:
            self._deltas.append(ToolCallCut(self._index, note))
        self._index = None

    def _new_id(self, name: str) -> str:
        match self._ids:
            case "mistral":
                return "".join(secrets.choice(_LETTERS) for _ in range(_MISTRAL_LENGTH))
            case "kimi":
                return f"{_NAMESPACE}{name}:{self._index}"
        return f"call_{secrets.token_hex(12)}"
