"""From tokens to text, piece by piece.

Everything here works with any object that has the three members of TokenDecoder.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from specdec.text.contract import TokenDecoder

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

    @property
    def is_start(self) -> bool:
        """Whether there is no text yet, neither the prompt's nor new one."""
        return not self._emitted

    @property
    def num_pinned(self) -> int:
        """Characters of new text that are kept back."""
        return len(self._text) - len(self._emitted)

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
        read_chunk = stable[len(self._emitted) :]
        if (
            not read_chunk
        ):  # no text at all, or bytes of a character: the finished ones stay in view
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
        return read_chunk + self._shorten()

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
                read_chunk = self._cut(n_head, n_tail)
                if read_chunk is not None:
                    return read_chunk
        return ""

    def _cut(self, n_head: int, n_tail: int) -> str | None:
        """Keep these ends of the window, if that is safe; the text that need not be held longer."""
        head, front = self._window[:n_head], self._window[:-n_tail]
        decode, cached = self._tokenizer.decode, head + self._window[-n_tail:]
        text, short = self._text, decode(cached)
        fronts = (decode(front), decode(head))
        # The tail may complete the character that both fronts end in, or begin a new one.
        for before, new_before in ([part.removesuffix(UNFINISHED) for part in fronts], fronts):
            behind = text[len(before) :]
            if text == before + behind and short == new_before + behind:
                break
        else:
            return None
        read_chunk = text[len(self._emitted) : len(before)]
        num_pinned = max(len(text) - max(len(self._emitted), len(before)), 0)
        self._emitted = short[: len(short) - num_pinned]
        self._window, self._text = cached, short
        return read_chunk

    def flush(self) -> str:
        """What is still kept back, unfinished characters as replacement characters."""
        read_chunk = (
            self._text[len(self._emitted) :] if len(self._window) > self._n_finished else ""
        )
        if read_chunk:
            self._emitted = self._text
        return read_chunk
