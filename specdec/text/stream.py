"""The text of a generation as it grows: pieces of the detokenizer, up to the first stop string."""

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
    """Looks for the first stop string in a stream of text pieces.

    "First" is the one that is complete first (of several, the longest): so the result does not
    depend on how the text is cut into pieces. The stop string itself is not part of the text.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._pinned = ""
        self.matched: str | None = None

    def push(self, read_chunk: str) -> StopMatch:
        """Take the next piece; after a stop everything is dropped."""
        if self.matched is not None:
            return StopMatch("", self.matched)
        text = self._pinned + read_chunk
        match = self._first_match(text)
        if match is not None:
            start, self.matched = match
            self._pinned = ""
            return StopMatch(text[:start], self.matched)
        num_pinned = self._n_possible_start(text)
        self._pinned = text[len(text) - num_pinned :]
        return StopMatch(text[: len(text) - num_pinned], None)

    def flush(self) -> str:
        """The text kept back, when no more will come."""
        pinned, self._pinned = self._pinned, ""
        return pinned

    def _first_match(self, text: str) -> tuple[int, str] | None:
        result = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if not result:
            return None
        _, start, stop = min(result)
        return start, stop

    def _n_possible_start(self, text: str) -> int:
        """Length of the longest end of the text with which a stop string begins."""
        longest = max((len(stop) for stop in self._stops), default=0)
        for n in range(min(longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._stops):
                return n
        return 0


@dataclass(frozen=True)
class TextUpdate:
    """What one step of tokens adds to the text.

    n_tokens: how many of the pushed tokens count: all, or up to and including the one that
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
        """A stream that goes on from here by itself."""
        other = copy.copy(self)
        other._detokenizer, other._stops = self._detokenizer.fork(), copy.copy(self._stops)
        return other

    def push(self, token_ids: Iterable[int]) -> TextUpdate:
        """Add a step's tokens; those after a completed stop string are not looked at."""
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
        """The rest of the text at the end of a generation; nothing after a stop string."""
        match = self._stops.push(self._detokenizer.flush())
        rest = "" if match.stop is not None else self._stops.flush()
        return TextUpdate(match.text + rest, 0, match.stop)
