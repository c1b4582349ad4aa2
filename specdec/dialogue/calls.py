"""Readers of single tool calls with a name, and arguments or tags behind it."""

from __future__ import annotations

import json
import re

from specdec.dialogue.cursor import Cursor, Emit, Parsing
from specdec.dialogue.formats import NamedCalls, TaggedCalls
from specdec.dialogue.json_calls import CallSink
from specdec.dialogue.schemas import ArgumentTypes, as_json
from specdec.dialogue.values import Cut, Malformed, ValueReader, escaped

_TEXT_ATTRIBUTES = ('string="true"', 'type="string"')
_VALUE_ATTRIBUTES = ('string="false"', 'type="')
_NO_NAME = re.compile(r"[\s,\"'{}\[\]]")
_MAX_NAME = 256  # characters; a longer one is a text that only begins as a call does


class CallReader:
    """Reader of calls from a cursor into a sink.

    Each `read_...` reads one call. Raises Malformed, Cut.
    """

    def __init__(self, cursor: Cursor, sink: CallSink, types: ArgumentTypes) -> None:
        self._cursor, self._sink, self._types = cursor, sink, types
        self._last_stop = ""

    # --- name(arguments) -------------------------------------------------------------------------

    def read_named(self, form: NamedCalls) -> Parsing[None]:
        """Read a call after its `opening`."""
        yield from self._cursor.skip()
        call_id = None
        if form.leading_id_end:
            call_id = yield from self._name((form.leading_id_end,))
        yield from self._cursor.take(form.before_name)
        name = yield from self._name(form.name_ends)
        if name == form.text_name:
            return
        if form.id_end and not (yield from self._begins_arguments(form)):
            call_id = yield from self._name((form.id_end,))
        yield from self._cursor.skip()
        while (yield from self._cursor.take(form.before_arguments)):
            yield from self._cursor.skip()
        letter = yield from self._cursor.peek()
        if letter not in ("{", "("):
            raise Cut("a call has no arguments") if not letter else Malformed("no arguments")
        self._sink.begin(name, call_id)
        reader = ValueReader(self._cursor, form.raw_quote)
        yield from reader.members(self._sink.arguments, "=" if letter == "(" else ":")
        self._sink.end()
        yield from self._cursor.skip()
        while (yield from self._cursor.take(form.closings)):
            yield from self._cursor.skip()

    def _begins_arguments(self, form: NamedCalls) -> Parsing[bool]:
        """Return whether the name ended with the mark that comes before arguments."""
        return self._last_stop == form.id_end or (yield from self._cursor.peek()) == "{"

    def _name(self, stops: tuple[str, ...]) -> Parsing[str]:
        name, stop = yield from _bounded(self._cursor, stops)
        if stop is None:
            raise Cut("the name of a tool is incomplete")
        if stop in ("{", "("):
            self._cursor.unread(stop)
        self._last_stop = stop
        name = name.strip()
        if not name:
            raise Malformed("a call has no name")
        return name

    # --- <parameter=name>value</parameter> -------------------------------------------------------

    def read_tagged(self, form: TaggedCalls) -> Parsing[None]:
        """Read a call after its `opening`."""
        stops = (*form.name_ends, form.parameter, form.closing)
        name = yield from self._name(stops)
        if self._last_stop in stops[-2:]:
            self._cursor.unread(self._last_stop)
        elif form.tag_end:
            yield from self._cursor.collect_until((form.tag_end,))
        self._sink.begin(name)
        self._sink.arguments("{")
        separator = ""
        while (yield from self._has_parameter(form)):
            yield from self._read_parameter(form, name, separator)
            separator = ", "
        self._sink.arguments("}")
        self._sink.end()

    def _has_parameter(self, form: TaggedCalls) -> Parsing[bool]:
        yield from self._cursor.skip()
        if (yield from self._cursor.take((form.closing,))):
            return False
        if (yield from self._cursor.take((form.parameter,))):
            return True
        if not (yield from self._cursor.peek()):
            if self._cursor.reason == "stop":
                return False  # only the closing tag is missing
            raise Cut("a call is incomplete")
        raise Malformed("no argument where one is due")

    def _read_parameter(self, form: TaggedCalls, name: str, separator: str) -> Parsing[None]:
        key, stop = yield from self._cursor.collect_until((form.key_end,))
        attributes = ""
        if stop is not None and form.value_tag_end:
            attributes, stop = yield from self._cursor.collect_until((form.value_tag_end,))
        if stop is None:
            raise Cut("an argument is incomplete")
        key = key.strip()
        types = self._types.types(name, key)
        if any(attribute in attributes for attribute in _TEXT_ATTRIBUTES):
            types = frozenset({"string"})
        elif any(attribute in attributes for attribute in _VALUE_ATTRIBUTES):
            types -= {"string"}
        emit, end = self._sink.arguments, form.value_end.replace("{key}", key)
        emit(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        if form.strips_newline:
            yield from self._cursor.take(("\n",))
        if types == {"string"}:
            emit('"')
            yield from self._read_value(form, end, lambda text: emit(escaped(text)))
            emit('"')
            return
        parts: list[str] = []
        yield from self._read_value(form, end, parts.append)
        emit(as_json("".join(parts), types))

    def _read_value(self, form: TaggedCalls, end: str, emit: Emit) -> Parsing[None]:
        ends = (f"\n{end}", end) if form.strips_newline else (end,)
        stop, _ = yield from self._cursor.read_until(ends, emit)
        if stop is None:
            raise Cut("an argument is incomplete")


def _bounded(cursor: Cursor, stops: tuple[str, ...]) -> Parsing[tuple[str, str | None]]:
    """Return a name and its end. Raises Malformed as soon as it is too long."""
    parts: list[str] = []

    def emit(text: str) -> None:
        parts.append(text)
        name = "".join(parts).strip()
        is_cut = cursor.reason is not None  # what comes last may be the begin of a stop
        if not is_cut and (len(name) > _MAX_NAME or _NO_NAME.search(name)):
            raise Malformed(f"{name[:40]!r} is no name of a tool")

    stop, _ = yield from cursor.read_until(stops, emit)
    return "".join(parts), stop
