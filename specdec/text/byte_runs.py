"""Byte tokens (`<0xE2>`, SentencePiece's byte fallback) in runs that are not valid UTF-8.

The decoder of the tokenizers library gives up a whole run of them for one invalid byte, and with it
characters that were complete before: text that a stream has shown already. SentencePiece's own
decoder and llama.cpp lose the invalid bytes alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_of(stored: str) -> int | None:
    """Return the byte that a token's stored form (`<0xE2>`) stands for; None for other tokens."""
    match = _BYTE_TOKEN.fullmatch(stored)
    return None if match is None else int(match[1], 16)


class ByteRuns:
    """Byte tokens of a transformers tokenizer, in both directions."""

    def __init__(self, hf_tokenizer: Any) -> None:
        self._hf_tokenizer = hf_tokenizer

    @cached_property
    def _bytes(self) -> Mapping[int, int]:
        """Bytes by token id."""
        vocabulary = self._hf_tokenizer.get_vocab().items()
        return {i: byte for token, i in vocabulary if (byte := byte_of(token)) is not None}

    @cached_property
    def _ids(self) -> Mapping[int, int]:
        """Token ids by byte."""
        return {byte: i for i, byte in self._bytes.items()}

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = getattr(self._hf_tokenizer, "added_tokens_decoder", {}).items()
        special = [i for i, token in added if token.special]
        return frozenset([*special, *self._hf_tokenizer.all_special_ids])

    def valid(self, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens, of which invalid bytes are replaced by those of U+FFFD.

        Special tokens are left out: they have no text, and bytes on both sides are one run.
        """
        shown = [i for i in token_ids if i not in self._special_ids]
        if len(self._ids) < 256:  # no byte fallback, or one that cannot write U+FFFD
            return shown
        tokens: list[int] = []
        for is_run, run in groupby(shown, self._bytes.__contains__):
            part = list(run)
            tokens += self._valid_run(part) if is_run else part
        return tokens

    def _valid_run(self, token_ids: Sequence[int]) -> list[int]:
        data = bytes(self._bytes[i] for i in token_ids)
        return [self._ids[byte] for byte in data.decode(errors="replace").encode()]
