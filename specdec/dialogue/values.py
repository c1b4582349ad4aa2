"""Reader of values that are written in JSON, in Python or in a model's own notation.

It emits JSON while it reads. It is lenient where a meaning is certain: Python's constants and
quotes, missing and trailing commas, line breaks in strings, unknown escapes.
"""

from __future__ import annotations

import json
import math
import re

from specdec.dialogue.cursor import SPACE, Cursor, Emit, Parsing

MAX_DEPTH = 64
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_WORD_ENDS = f"{SPACE},:=()[]{{}}\"'"
_ESCAPES = '"\\/bfnrt'
_CLOSING = {"{": "}", "[": "]", "(": ")"}


class Malformed(Exception):
    """The text is not in the expected notation."""


class Cut(Malformed):
    """The text ends before it is complete."""


class ValueReader:
    """Reader of one value after another.

    raw_quote: a string that begins and ends texts in which nothing is escaped, or "". With it,
        words without quotes are texts, too.
    """

    def __init__(self, cursor: Cursor, raw_quote: str = "") -> None:
        self._cursor, self._raw_quote = cursor, raw_quote

    def value(self, emit: Emit, depth: int = 0) -> Parsing[None]:
        """Read a value. Raises Malformed, Cut."""
        if depth > MAX_DEPTH:
            raise Malformed("the value is nested too deeply")
        yield from self._cursor.skip()
        letter = yield from self._cursor.peek()
        if letter == "{":
            yield from self.members(emit, depth=depth)
        elif letter in ("[", "("):
            yield from self._items(letter, emit, depth)
        elif (quote := (yield from self._quote())) is not None:
            yield from self._string(quote, emit)
        else:
            emit(self._constant((yield from self._word())))

    def members(self, emit: Emit, assign: str = ":", depth: int = 0) -> Parsing[None]:
        """Read an object, or with `=` the keyword arguments of a call. The bracket comes next."""
        yield from self._open()
        emit("{")
        is_first = True
        while (yield from self._has_item("}" if assign == ":" else ")")):
            key = yield from self._key()
            yield from self._cursor.skip()
            if (yield from self._cursor.take((assign,))) is None:
                raise Malformed(f"no {assign!r} behind a name")
            emit(("" if is_first else ", ") + key + ": ")
            yield from self.value(emit, depth + 1)
            is_first = False
        emit("}")

    def _items(self, letter: str, emit: Emit, depth: int) -> Parsing[None]:
        yield from self._open()
        emit("[")
        is_first = True
        while (yield from self._has_item(_CLOSING[letter])):
            if not is_first:
                emit(", ")
            yield from self.value(emit, depth + 1)
            is_first = False
        emit("]")

    def _open(self) -> Parsing[None]:
        yield from self._cursor.peek()
        self._cursor.advance(1)

    def _has_item(self, closing: str) -> Parsing[bool]:
        """Return whether an item follows; else the closing bracket has been read."""
        yield from self._cursor.skip(SPACE + ",")
        letter = yield from self._cursor.peek()
        if not letter:
            raise Cut("the value is incomplete")
        if letter == closing:
            self._cursor.advance(1)
        return letter != closing

    def text(self) -> Parsing[str]:
        """Read a string, and return its text. Raises Malformed, Cut."""
        yield from self._cursor.skip()
        quote = yield from self._quote()
        if quote is None:
            raise Malformed("no string where one is due")
        parts: list[str] = []
        yield from self._string(quote, parts.append)
        try:
            return str(json.loads("".join(parts)))
        except ValueError as error:
            raise Malformed("the string is broken") from error

    def _key(self) -> Parsing[str]:
        quote = yield from self._quote()
        if quote is None:
            word = yield from self._word()
            return json.dumps(word, ensure_ascii=False)
        parts: list[str] = []
        yield from self._string(quote, parts.append)
        return "".join(parts)

    def _quote(self) -> Parsing[str | None]:
        return (yield from self._cursor.take(('"', "'", self._raw_quote)))

    def _string(self, quote: str, emit: Emit) -> Parsing[None]:
        emit('"')
        is_raw = quote == self._raw_quote
        stops = (quote,) if is_raw else (quote, "\\")
        while True:
            stop, _ = yield from self._cursor.read_until(stops, lambda text: emit(escaped(text)))
            if stop is None:
                raise Cut("a string is incomplete")
            if stop == quote:
                break
            emit((yield from self._escape()))
        emit('"')

    def _escape(self) -> Parsing[str]:
        """Return the JSON of what follows a backslash."""
        letter = yield from self._cursor.peek()
        if not letter:
            raise Cut("a string is incomplete")
        if letter == "u":
            digits = (yield from self._cursor.peek(5))[1:]
            if re.fullmatch("[0-9a-fA-F]{4}", digits) is None:
                return "\\\\"
            self._cursor.advance(5)
            return f"\\u{digits}"
        if letter in _ESCAPES:
            self._cursor.advance(1)
            return f"\\{letter}"
        if letter == "'":
            self._cursor.advance(1)
            return letter
        return "\\\\"

    def _word(self) -> Parsing[str]:
        word = ""
        stops = (*_WORD_ENDS, self._raw_quote) if self._raw_quote else tuple(_WORD_ENDS)
        word, stop = yield from self._cursor.collect_until(stops)
        if stop is None:
            raise Cut("a value is incomplete")
        self._cursor.unread(stop)
        if not word:
            raise Malformed(f"{stop!r} where a value is due")
        return word

    def _constant(self, word: str) -> str:
        if word in ("true", "false", "null") or _NUMBER.fullmatch(word):
            return word
        if word in _CONSTANTS:
            return _CONSTANTS[word]
        number = as_number(word)
        if number is not None:
            return number
        if self._raw_quote:
            return json.dumps(word, ensure_ascii=False)
        raise Malformed(f"{word[:20]!r} is no value")


def escaped(text: str) -> str:
    """Return a text as it stands between the quotes of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def as_number(word: str) -> str | None:
    """Return the JSON of a number in Python's notation; None if it is none."""
    for kind in (int, float):
        try:
            number = kind(word)
        except ValueError:
            continue
        return json.dumps(number) if math.isfinite(number) else None
    return None
