"""From tokens to text: incremental detokenizer, stop strings.

Everything here works with any object that has the three members of TokenDecoder.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specdec.text.tokenizer import TokenDecoder

UNFINISHED = "\ufffd"  # what decoders give for bytes that are no complete character (yet)
CONTEXT_TOKENS = 6  # of the prompt: enough for decoders that look at the neighbours of a token
MAX_EXTRA_CONTEXT_TOKENS = 16
MAX_PENDING_TOKENS = 16  # of unfinished text in a window before its middle is given up
_CHARACTER_BYTES = 4  # the longest in UTF-8; every token with text has at least one byte


class IncrementalDetokenizer:
    """Text of a growing token sequence, in pieces that never have to be taken back.

    A token's text depends on its neighbours: sentencepiece drops the leading space of the first
    token of a text, and a character may be spread over several byte tokens. So a window of the last
    finished tokens and the new ones is decoded each time, and what goes beyond the finished ones'
    text is new. A trailing replacement character is kept back: the next token may complete it.
    The window stays small: tokens without any text leave it, and so does the middle of a long run
    of bytes that make no character.
    The pieces of `push` and `flush` together are the text that the tokens add after the prompt.
    """

    def __init__(self, tokenizer: TokenDecoder, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = self._end_of(prompt_ids)
        self._n_finished = len(self._window)  # tokens of the window whose text is complete
        self._emitted = tokenizer.decode(self._window) if self._window else ""
        self._text = self._emitted
        self._textless: set[int] = set()  # ids known to add no text, wherever they stand

    def fork(self) -> IncrementalDetokenizer:
        """One that goes on from here by itself."""
        other = copy.copy(self)
        other._window = list(self._window)
        return other

    def _end_of(self, prompt_ids: Sequence[int]) -> list[int]:
        """The prompt's last tokens, more of them where the cut would divide a character."""
        window: list[int] = []
        for n in range(CONTEXT_TOKENS, CONTEXT_TOKENS + MAX_EXTRA_CONTEXT_TOKENS):
            window = list(prompt_ids[-n:])
            if len(window) < n or UNFINISHED not in self._tokenizer.decode(window):
                break
        return window

    def push(self, token_id: int) -> str:
        """The text that this token completes; often all of its own, sometimes nothing."""
        token_id = int(token_id)
        if token_id in self._textless:
            return ""
        self._window.append(token_id)
        before, self._text = self._text, self._tokenizer.decode(self._window)
        stable = self._text.rstrip(UNFINISHED)
        piece = stable[len(self._emitted) :]
        if not piece:  # no text at all, or bytes of a character: the finished ones stay in view
            if self._text == before and self._has_no_text(token_id):
                self._window.pop()
            return self._shorten()
        if len(stable) == len(self._text):
            # All text is out: the newest tokens become the finished ones of the next window, which
            # therefore always begins between two characters.
            self._window = self._window[self._n_finished :]
            self._n_finished = len(self._window)
            self._text = self._emitted = self._tokenizer.decode(self._window)
        else:
            self._emitted = stable
        return piece + self._shorten()

    def _has_no_text(self, token_id: int) -> bool:
        """Whether it is a special token, say. One alone would not tell: a first space is dropped,
        too, and a byte may change nothing that can be seen yet."""
        if self._tokenizer.decode([token_id] * _CHARACTER_BYTES) != "":
            return False
        self._textless.add(token_id)
        return True

    def _shorten(self) -> str:
        """Take the middle out of a window that has become long; the text that is final by that.

        What remains is the head, which shows that a run of bytes began wrong (some decoders then
        give up all of it), and a tail in which a decoder surely meets the next character's start.
        Only a middle is taken without which the tail's text is the same.
        """
        if len(self._window) <= self._n_finished + MAX_PENDING_TOKENS:
            return ""
        for n_tail in range(_CHARACTER_BYTES, 2 * _CHARACTER_BYTES + 1):
            for n_head in range(self._n_finished + _CHARACTER_BYTES, len(self._window) - n_tail):
                piece = self._cut(n_head, n_tail)
                if piece is not None:
                    return piece
        return ""

    def _cut(self, n_head: int, n_tail: int) -> str | None:
        """Keep these ends of the window, if that is safe; the text that need not be held longer."""
        head, front = self._window[:n_head], self._window[:-n_tail]
        decode, kept = self._tokenizer.decode, head + self._window[-n_tail:]
        text, short = self._text, decode(kept)
        fronts = (decode(front), decode(head))
        # The tail may complete the character that both fronts end in, or begin a new one.
        for before, new_before in ([part.removesuffix(UNFINISHED) for part in fronts], fronts):
            behind = text[len(before) :]
            if text == before + behind and short == new_before + behind:
                break
        else:
            return None
        piece = text[len(self._emitted) : len(before)]
        n_held = max(len(text) - max(len(self._emitted), len(before)), 0)
        self._emitted = short[: len(short) - n_held]
        self._window, self._text = kept, short
        return piece

    def flush(self) -> str:
        """What is still kept back, unfinished characters as replacement characters."""
        piece = self._text[len(self._emitted) :] if len(self._window) > self._n_finished else ""
        if piece:
            self._emitted = self._text
        return piece


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
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> StopMatch:
        """Take the next piece; after a stop everything is dropped."""
        if self.found is not None:
            return StopMatch("", self.found)
        text = self._held + piece
        match = self._first_match(text)
        if match is not None:
            start, self.found = match
            self._held = ""
            return StopMatch(text[:start], self.found)
        n_held = self._n_possible_start(text)
        self._held = text[len(text) - n_held :]
        return StopMatch(text[: len(text) - n_held], None)

    def flush(self) -> str:
        """The text kept back, when no more will come."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if not found:
            return None
        _, start, stop = min(found)
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
    """What one round of tokens adds to the text.

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
        """Add a round's tokens; those after a completed stop string are not looked at."""
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
