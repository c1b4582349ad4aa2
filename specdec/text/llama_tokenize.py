"""llama.cpp's tokenizer, called so that no text can crash the process.

Many of its pre-tokenizers are expressions of std::regex, which recurses once for each character of
a word: 28,000 of them use up a stack of 8 MiB. Where the trial of a model found that
(backends/llama/trial.py), long texts are tokenized in a thread with a large stack, and refused
where a line is too long even for that.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from typing import Any

from backends.llama.trial import TextLimits
from backends.llama.trial_worker import MAX_CHARACTERS, STACK_BYTES
from offload.process.worker import call_in_thread
from offload.units import MIB, format_bytes
from specdec.text.contract import TokenizerError

MAX_TEXT_BYTES = 64 * MIB  # far above any context
NO_LIMITS = TextLimits(None)
_SHORT_BYTES = 1000  # any thread has a stack for it
_LINE_END = re.compile(r"\n(?=\S)")
"""Line end that no word of a pre-tokenizer crosses, which the trial checks."""
_TOKENIZE = ctypes.CFUNCTYPE(
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.POINTER(ctypes.c_int32),
    ctypes.c_int32,
    ctypes.c_bool,
    ctypes.c_bool,
)
"""Type of llama_tokenize: vocabulary, text, its length, token buffer, its capacity, and whether
special tokens are added and recognised."""


class LlamaTokenize:
    """Tokenizer of texts with one vocabulary, which must outlive it."""

    def __init__(self, library: Any, vocab: Any, limits: TextLimits = NO_LIMITS) -> None:
        self._library, self._vocab, self._limits = library, vocab, limits
        self._callback = _TOKENIZE(self._tokenize_for_grammar)

    def __call__(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        """Return the token ids of a text.

        parse_special: whether special tokens that are written out in it are recognised.
        Raises TokenizerError for invalid Unicode, or a text that is too long."""
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"the text is not valid Unicode (a lone surrogate at {error.start})"
            ) from None
        if len(data) > MAX_TEXT_BYTES:
            raise TokenizerError(
                f"the text has {format_bytes(len(data))}, and {format_bytes(MAX_TEXT_BYTES)} are "
                "accepted: shorten it"
            )
        check_lines(text, self._limits)
        return self._tokenize(data, add_special_tokens, parse_special)

    @property
    def function(self) -> int | None:
        """Address of a function like llama_tokenize, for bytes of any length; valid as long as this
        object."""
        own = self._library._lib.llama_tokenize if self._is_unlimited else self._callback
        return ctypes.cast(own, ctypes.c_void_p).value

    @property
    def _is_unlimited(self) -> bool:
        return self._limits.max_characters is None

    def _tokenize(self, data: bytes, *are_special: bool) -> list[int]:
        """Tokenize. are_special: whether special tokens are added, and parsed in the text."""
        if self._is_unlimited or len(data) <= _SHORT_BYTES:
            return self._tokenize_here(data, *are_special)
        return self._tokenize_in_large_stack(data, *are_special)

    def _tokenize_in_large_stack(self, data: bytes, *are_special: bool) -> list[int]:
        def tokenize() -> list[int]:
            return self._tokenize_here(data, *are_special)

        return call_in_thread(tokenize, "specdec-tokenizer", stack_bytes=STACK_BYTES)

    def _tokenize_here(self, data: bytes, *are_special: bool) -> list[int]:
        max_count = len(data) + 8  # one token per byte, and what is added at the ends
        while True:
            ids = (self._library.llama_token * max_count)()
            n = self._library.llama_tokenize(
                self._vocab, data, len(data), ids, max_count, *are_special
            )
            if n >= 0:
                return list(ids[:n])
            if -n <= max_count:
                raise TokenizerError(f"llama.cpp cannot tokenize a text of {len(data)} bytes")
            max_count = -n  # invalid or rewritten bytes have more tokens

    def _tokenize_for_grammar(
        self, _: Any, text: int, n_bytes: int, tokens: Any, max_count: int, *are_special: bool
    ) -> int:
        """Tokenize a grammar's text like llama_tokenize. Long texts are cut: bytes are forced,
        and any tokens that spell them will do."""
        data = ctypes.string_at(text, n_bytes)
        ids = [i for piece in _pieces(data) for i in self._tokenize(piece, *are_special)]
        if len(ids) > max_count:
            return -len(ids)
        ctypes.memmove(tokens, (ctypes.c_int32 * len(ids))(*ids), 4 * len(ids))
        return len(ids)


def check_lines(text: str, limits: TextLimits) -> None:
    """Raise TokenizerError where a line is longer than the tokenizer supports."""
    limit = limits.max_characters
    if limit is None or len(text) <= limit:
        return
    longest = max(map(len, _LINE_END.split(text)))
    if longest > limit:
        raise TokenizerError(
            f"the text has a line of {longest} characters, and this model's tokenizer takes "
            f"{limit} at most: break it into several lines"
        )


def _pieces(data: bytes) -> Iterator[bytes]:
    """Yield pieces of whole characters, at most MAX_CHARACTERS bytes each; one piece if empty."""
    start = 0
    while len(data) - start > MAX_CHARACTERS:
        end = start + MAX_CHARACTERS
        while end > start + 1 and data[end] & 0xC0 == 0x80:
            end -= 1
        yield data[start:end]
        start = end
    yield data[start:]
