"""Incremental detokenizer: tokens to text, piece by piece.

It works with any object that has the three members of TokenDecoder.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from specdec.text.contract import TokenDecoder

UNFINISHED = "\ufffd"  # decoders give it for bytes of an incomplete character
CONTEXT_TOKENS = 6  # of the prompt: enough for decoders that depend on neighbouring tokens
MAX_EXTRA_CONTEXT_TOKENS = 16
MAX_PENDING_TOKENS = 16  # of unfinished text in a window before its middle is dropped
_CHARACTER_BYTES = 4  # the longest in UTF-8; every token with text has at least one byte


class IncrementalDetokenizer:
    """Text of a growing token sequence, in pieces that are never retracted.

    A token's text depends on its neighbours: sentencepiece drops the leading space of the first
    token of a text, and a character may be spread over several byte tokens. So a window of the last
    finished tokens and the new ones is decoded each time, and the text after that of the finished
    ones is new. A trailing replacement character is held back: the next token may complete it.
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
        self._textless: set[int] = set()  # ids known to add no text at any position

    @property
    def is_start(self) -> bool:
        """Whether there is no text yet, neither of the prompt nor new."""
        return not self._emitted

    @property
    def num_withheld(self) -> int:
        """Number of characters of new text that are held back."""
        return len(self._text) - len(self._emitted)

    def fork(self) -> IncrementalDetokenizer:
        """Return an independent detokenizer that continues from here."""
        other = copy.copy(self)
        other._window = list(self._window)
        return other

    def _end_of(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return the prompt's last tokens, more of them where the cut would divide a character."""
        window: list[int] = []
        for n in range(CONTEXT_TOKENS, CONTEXT_TOKENS + MAX_EXTRA_CONTEXT_TOKENS):
            window = list(prompt_ids[-n:])
            if len(window) < n or UNFINISHED not in self._tokenizer.decode(window):
                break
        return window

    def push(self, token_id: int) -> str:
        """Return the text that this token completes: often its own, sometimes none."""
        token_id = int(token_id)
        if token_id in self._textless:
            return ""
        self._window.append(token_id)
        before, self._text = self._text, self._tokenizer.decode(self._window)
        stable = self._text.rstrip(UNFINISHED)
        piece = stable[len(self._emitted) :]
        if not piece:  # no text, or bytes of a character: the finished tokens stay
            if self._text == before and self._has_no_text(token_id):
                self._window.pop()
            return self._shorten()
        if len(stable) == len(self._text):
            # All text is emitted: the newest tokens become the finished ones of the next window,
            # which therefore always begins between two characters.
            self._window = self._window[self._n_finished :]
            self._n_finished = len(self._window)
            self._text = self._emitted = self._tokenizer.decode(self._window)
        else:
            self._emitted = stable
        return piece + self._shorten()

    def _has_no_text(self, token_id: int) -> bool:
        """Return whether a token has no text (special tokens). Several copies are decoded: a first
        space is dropped, too, and a single byte may not be visible yet."""
        if self._tokenizer.decode([token_id] * _CHARACTER_BYTES) != "":
            return False
        self._textless.add(token_id)
        return True

    def _shorten(self) -> str:
        """Remove the middle of a window that has become long; return the text that becomes final.

        The head remains, which shows that a run of bytes is invalid (some decoders then drop all of
        it), and a tail in which a decoder surely finds the next character's start. A middle is only
        removed if the tail's text stays the same.
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
        """Keep these ends of the window, if that is safe; return the text that becomes final."""
        head, front = self._window[:n_head], self._window[:-n_tail]
        decode, ends = self._tokenizer.decode, head + self._window[-n_tail:]
        text, short = self._text, decode(ends)
        fronts = (decode(front), decode(head))
        # The tail may complete the character that both fronts end in, or begin a new one.
        for before, new_before in ([part.removesuffix(UNFINISHED) for part in fronts], fronts):
            behind = text[len(before) :]
            if text == before + behind and short == new_before + behind:
                break
        else:
            return None
        piece = text[len(self._emitted) : len(before)]
        n_held_back = max(len(text) - max(len(self._emitted), len(before)), 0)
        self._emitted = short[: len(short) - n_held_back]
        self._window, self._text = ends, short
        return piece

    def flush(self) -> str:
        """Return the text still held back, with unfinished characters as replacement characters."""
        piece = self._text[len(self._emitted) :] if len(self._window) > self._n_finished else ""
        if piece:
            self._emitted = self._text
        return piece
