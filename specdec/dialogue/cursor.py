"""Text that arrives piece by piece, and the parsers' operations on it.

A parser is a generator: it yields where it needs more text, and goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from specdec.text.stream import possible_start

T = TypeVar("T")
Parsing = Generator[None, None, T]
Emit = Callable[[str], None]

SPACE = " \t\r\n"


class Cursor:
    """Position in a growing text.

    reason: why the text ended ("stop", "length"); None while it may go on.
    """

    def __init__(self) -> None:
        self._text, self._at = "", 0
        self._n_dropped = 0
        self._mark: int | None = None
        self.reason: str | None = None

    @property
    def position(self) -> int:
        """Number of characters before the cursor."""
        return self._n_dropped + self._at

    @property
    def rest(self) -> str:
        return self._text[self._at :]

    def push(self, text: str) -> None:
        start = self._at if self._mark is None else self._mark - self._n_dropped
        self._text, self._at = self._text[start:] + text, self._at - start
        self._n_dropped += start

    def mark(self, n_back: int = 0) -> None:
        """Keep the text from n_back characters before here, for `marked`."""
        self._mark = self.position - n_back

    def marked(self) -> str:
        """Return the text since the mark, and remove the mark."""
        assert self._mark is not None
        text = self._text[self._mark - self._n_dropped : self._at]
        self._mark = None
        return text

    def rewind(self, n: int) -> None:
        """Go back to n characters behind the mark, if the cursor is beyond that."""
        assert self._mark is not None
        self._at = min(self._at, self._mark - self._n_dropped + n)

    def advance(self, n: int) -> None:
        self._at += n

    def unread(self, text: str) -> None:
        """Go back before a text that was read last."""
        self._at -= len(text)

    def more(self) -> Parsing[bool]:
        """Wait for more text; False at the end."""
        if self.reason is None:
            yield
        return self.reason is None or bool(self.rest)

    def peek(self, n: int = 1) -> Parsing[str]:
        """Return the next n characters; fewer at the end."""
        while len(self._text) - self._at < n and self.reason is None:
            yield
        return self._text[self._at : self._at + n]

    def skip(self, characters: str = SPACE) -> Parsing[str]:
        """Skip these characters; return the skipped ones."""
        skipped = ""
        while (letter := (yield from self.peek())) and letter in characters:
            self._at += 1
            skipped += letter
        return skipped

    def take(self, literals: Sequence[str]) -> Parsing[str | None]:
        """Return the longest of the literals that comes next, and skip it; None if none does."""
        for literal in sorted(filter(None, literals), key=len, reverse=True):
            n = 1
            while (yield from self.peek(n)) == literal[:n]:
                if n == len(literal):
                    self._at += n
                    return literal
                n += 1
        return None

    def read_until(
        self, stops: Sequence[str], emit: Emit, *, held_back: str = ""
    ) -> Parsing[tuple[str | None, str]]:
        """Emit text up to the first of these stops, and skip that.

        held_back: characters that are not emitted directly before a stop.

        Returns:
            The stop, None at the text's end, and the characters held back before it.
        """
        while True:
            rest, is_over = self.rest, self.reason is not None
            stop = first_of(stops, rest)
            # A longer stop that is incomplete may begin before one that is complete.
            n_safe = len(rest) - (0 if is_over else possible_start(rest, stops))
            if stop is not None and stop[0] < n_safe:
                start, length = stop
                shown = rest[:start].rstrip(held_back) if held_back else rest[:start]
                self._emit(emit, len(shown))
                self._at += start - len(shown) + length
                return rest[start : start + length], rest[len(shown) : start]
            if held_back:
                n_safe = len(rest[:n_safe].rstrip(held_back))
            self._emit(emit, n_safe)
            if is_over:
                self._at = len(self._text)
                return None, rest[n_safe:]
            yield

    def _emit(self, emit: Emit, n: int) -> None:
        if n:
            emit(self._text[self._at : self._at + n])
            self._at += n

    def collect_until(self, stops: Sequence[str]) -> Parsing[tuple[str, str | None]]:
        """Return the text up to the first of these stops, and the stop (None at the end)."""
        parts: list[str] = []
        stop, _ = yield from self.read_until(stops, parts.append)
        return "".join(parts), stop


def first_of(stops: Sequence[str], text: str) -> tuple[int, int] | None:
    """Return (start, length) of the stop that begins first in a text, the longest there."""
    matches = [(start, -len(stop)) for stop in stops if (start := text.find(stop)) >= 0]
    if not matches:
        return None
    start, length = min(matches)
    return start, -length
