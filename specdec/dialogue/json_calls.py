"""Reader of single tool calls in JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Protocol

from specdec.dialogue.cursor import SPACE, Cursor, Parsing
from specdec.dialogue.values import Cut, Malformed, ValueReader

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters", "args")
_IDS = ("id", "tool_call_id", "call_id")
_WRAPPER = "function"
_KNOWN = (*_NAMES, *_ARGUMENTS, *_IDS, _WRAPPER, "type")


class CallSink(Protocol):
    """Receiver of a call's parts."""

    def begin(self, name: str, call_id: str | None = None) -> None: ...

    def arguments(self, text: str) -> None: ...

    def end(self) -> None: ...


class JsonCallReader:
    """Reader of calls from a cursor into a sink. Raises Malformed, Cut."""

    def __init__(self, cursor: Cursor, sink: CallSink) -> None:
        self._cursor, self._sink = cursor, sink

    def read(self, names: Callable[[str], bool] | None = None) -> Parsing[None]:
        """Read an object. names: accepts the names that a call may have; all by default."""
        state = _JsonCall(self._sink, names)
        yield from self._read_object(state)
        state.finish()

    def _read_object(self, state: _JsonCall) -> Parsing[None]:
        reader = ValueReader(self._cursor)
        self._cursor.advance(1)
        while (yield from self._has_member()):
            key = yield from reader.text()
            yield from self._expect(":")
            yield from self._cursor.skip()
            if key in _NAMES:
                state.name((yield from reader.text()))
            elif key in _ARGUMENTS:
                yield from self._read_arguments(reader, state)
            elif key == _WRAPPER and (yield from self._cursor.peek()) == "{":
                yield from self._read_object(state)
            elif key == _WRAPPER:
                state.name((yield from reader.text()))
            elif key in _KNOWN:
                yield from reader.value(_ignore)
            else:
                raise Malformed(f"{key[:40]!r} is no part of a call")

    def _has_member(self) -> Parsing[bool]:
        yield from self._cursor.skip(SPACE + ",")
        letter = yield from self._cursor.peek()
        if not letter:
            raise Cut("a call is incomplete")
        if letter == "}":
            self._cursor.advance(1)
        return letter != "}"

    def _read_arguments(self, reader: ValueReader, state: _JsonCall) -> Parsing[None]:
        letter = yield from self._cursor.peek()
        if letter == "{":
            state.open_arguments()
            yield from reader.members(state.emit)
        elif letter == '"':
            text = yield from reader.text()
            if not isinstance(_loaded(text), dict):
                raise Malformed("the arguments are no object")
            state.open_arguments()
            state.emit(text)
        else:
            parts: list[str] = []
            yield from reader.value(parts.append)
            if parts != ["null"]:
                raise Malformed("the arguments are no object")
            state.open_arguments()
            state.emit("{}")
        state.close_arguments()

    def read_keyed(self) -> Parsing[None]:
        """Read `{"name": {...}}`."""
        self._cursor.advance(1)
        reader = ValueReader(self._cursor)
        name = yield from reader.text()
        yield from self._expect(":")
        yield from self._cursor.skip()
        if (yield from self._cursor.peek()) != "{":
            raise Malformed("the arguments are no object")
        self._sink.begin(name)
        yield from reader.members(self._sink.arguments)
        self._sink.end()
        yield from self._cursor.skip()
        yield from self._cursor.take(("}",))

    def _expect(self, literal: str) -> Parsing[None]:
        yield from self._cursor.skip()
        if (yield from self._cursor.take((literal,))) is None:
            letter = yield from self._cursor.peek()
            raise Malformed(f"no {literal!r}") if letter else Cut("a call is incomplete")


class _JsonCall:
    """State of a call in JSON, whose name may come behind its arguments."""

    def __init__(self, sink: CallSink, names: Callable[[str], bool] | None) -> None:
        self._sink, self._accepts = sink, names
        self._name: str | None = None
        self._parts: list[str] = []
        self._has_begun = self._is_over = False

    def name(self, name: str) -> None:
        if self._name is not None or not name.strip():
            raise Malformed("a call has two names, or none")
        if self._accepts is not None and not self._accepts(name):
            raise Malformed(f"{name[:40]!r} is no tool")
        self._name = name.strip()
        if self._is_over:
            self._begin()

    def open_arguments(self) -> None:
        if self._is_over:
            raise Malformed("a call has its arguments twice")
        if self._name is not None:
            self._begin()

    def _begin(self) -> None:
        assert self._name is not None
        self._sink.begin(self._name)
        self._has_begun = True
        for part in self._parts:
            self._sink.arguments(part)
        if self._is_over:
            self._sink.end()

    def emit(self, text: str) -> None:
        if self._has_begun:
            self._sink.arguments(text)
        else:
            self._parts.append(text)

    def close_arguments(self) -> None:
        self._is_over = True
        if self._has_begun:
            self._sink.end()

    def finish(self) -> None:
        """End the object."""
        if self._name is None:
            raise Malformed("a call has no name")
        if not self._is_over:
            self.open_arguments()
            self.emit("{}")
            self.close_arguments()


def _ignore(text: str) -> None:
    pass


def _loaded(text: str) -> object:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value
