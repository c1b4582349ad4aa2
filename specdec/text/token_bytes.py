"""Bytes that each token of a transformers tokenizer adds to a text."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from specdec.text.byte_runs import byte_of
from specdec.text.contract import TokenDecoder
from specdec.text.detokenizer import UNFINISHED


def _byte_level_alphabet() -> dict[str, int]:
    """Return the bytes that GPT-2's characters encode: printable ones encode themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(0x100) if byte not in printable]
    shifted = {chr(0x100 + i): byte for i, byte in enumerate(unprintable)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTE_LEVEL = _byte_level_alphabet()


class HfTokenBytes:
    """Bytes of a transformers tokenizer's tokens: the text that its decoder adds after other text.

    Bytes that are no text by themselves come from the token's stored form: `<0xE2>` of
    SentencePiece's byte fallback, or GPT-2's letters for bytes.
    """

    def __init__(self, decoder: TokenDecoder, hf_tokenizer: Any) -> None:
        self._decoder, self._hf_tokenizer = decoder, hf_tokenizer
        self._cache: dict[int, bytes] = {}
        self._anchor: tuple[list[int], str] | None = None

    def __call__(self, token_id: int) -> bytes:
        if token_id not in self._cache:
            self._cache[token_id] = self._find(token_id)
        return self._cache[token_id]

    def _find(self, token_id: int) -> bytes:
        if not 0 <= token_id < self._decoder.n_tokens:
            return b""
        if self._anchor is None:
            self._anchor = self._find_anchor()
        before, text_before = self._anchor
        text = self._decoder.decode([*before, token_id])
        if text.startswith(text_before):
            text = text[len(text_before) :]
        else:  # a decoder that depends on several tokens
            text = self._decoder.decode([token_id])
        stored = self._hf_tokenizer.convert_ids_to_tokens(token_id) if UNFINISHED in text else None
        return text.encode(errors="replace") if stored is None else _stored_bytes(str(stored))

    def _find_anchor(self) -> tuple[list[int], str]:
        """Return (ids, text) to decode after, so that no token is decoded as a text's first."""
        letter: list[int] = []
        with suppress(Exception):  # vocabularies without a token for it or for unknown text
            letter = self._hf_tokenizer.encode("a", add_special_tokens=False)
        for ids in (letter, *([i] for i in range(self._decoder.n_tokens))):
            text = self._decoder.decode(ids)
            if text[-1:].isalnum() and UNFINISHED not in text:
                return ids, text
        return [], ""


def _stored_bytes(stored: str) -> bytes:
    byte = byte_of(stored)
    if byte is not None:
        return bytes([byte])
    if all(letter in _BYTE_LEVEL for letter in stored):
        return bytes(_BYTE_LEVEL[letter] for letter in stored)
    return stored.encode(errors="replace")
