"""Text stream of a generation: pieces of the detokenizer, up to the first stop string."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specdec.text.contract import TokenDecoder
from specdec.text.detokenizer import IncrementalDetokenizer


@dataclass(frozen=True)
class StopMatch:
    """Result of one `StopStrings.push`."""

    text: str  # safe to show: neither part of a stop string nor possibly the start of one
    stop: str | None  # the stop string that appeared; everything after `text` is dropped


class StopStrings:
    """Search for the first stop string in a stream of text pieces.

    The first is the one that is complete first (of several, the longest), so the result does not
    depend on how the text is cut into pieces. The stop string itself is not part of the text.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._held_back = ""
        self.matched: str | None = None

    def push(self, piece: str) -> StopMatch:
        """Take the next piece; after a stop everything is dropped."""
        if self.matched is not None:
            return StopMatch("", self.matched)
        text = self._held_back + piece
        match = self._first_match(text)
        if match is not None:
            start, self.matched = match
            self._held_back = ""
            return StopMatch(text[:start], self.matched)
        end = len(text) - possible_start(text, self._stops)
        self._held_back = text[end:]
        return StopMatch(text[:end], None)

    def flush(self) -> str:
        """Return the text held back, at the end of the stream."""
        held_back, self._held_back = self._held_back, ""
        return held_back

    def _first_match(self, text: str) -> tuple[int, str] | None:
        matches = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop


def possible_start(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest suffix of the text that a stop string begins with."""
    longest = max((len(stop) for stop in stops), default=0)
    for n in range(min(longest - 1, len(text)), 0, -1):
        if any(stop.startswith(text[-n:]) for stop in stops):
            return n
    return 0


@dataclass(frozen=True)
class TextUpdate:
    """Text added by the tokens of one step.

    n_tokens: number of pushed tokens that count: all, or up to and including the one that
        completed a stop string.
    """

    text: str
    n_tokens: int
    stop: str | None = None


class TextStream:
    """Detokenizer and stop strings together: emitted tokens in, text for the caller out."""

    def __init__(
        self, tokenizer: TokenDecoder, *, prompt_ids: Sequence[int] = (), stop: Iterable[str] = ()
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids)
        self._stops = StopStrings(stop)

    def fork(self) -> TextStream:
        """Return an independent stream that continues from here."""
        other = copy.copy(self)
        other._detokenizer, other._stops = self._detokenizer.fork(), copy.copy(self._stops)
        return other

    def push(self, token_ids: Iterable[int]) -> TextUpdate:
        """Add a step's tokens; tokens after a completed stop string are ignored."""
        pieces = []
        n_tokens = 0
        for token_id in token_ids:
            match = self._stops.push(self._detokenizer.push(token_id))
            pieces.append(match.text)
            n_tokens += 1
            if match.stop is not None:
                return TextUpdate("".join(pieces), n_tokens, match.stop)
        return TextUpdate("".join(pieces), n_tokens)

    def flush(self) -> TextUpdate:
        """Return the remaining text at the end of a generation; nothing after a stop string."""
        match = self._stops.push(self._detokenizer.flush())
        tail = "" if match.stop is not None else self._stops.flush()
        return TextUpdate(match.text + tail, 0, match.stop)
