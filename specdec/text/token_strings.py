"""Description of single tokens: their texts, bytes and offsets.

All of it is based on the bytes of a token (`TokenSpeller.token_bytes`): the bytes of consecutive
tokens, joined, are the text's.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from specdec.text.contract import TokenSpeller
from specdec.text.detokenizer import IncrementalDetokenizer


class TokenText(NamedTuple):
    """A token at its position in a sequence.

    text: see `shown`; data: its bytes; offset: characters of the new text before it.
    """

    text: str
    data: bytes
    offset: int


class TokenStrings:
    """Texts of a sequence's tokens, one after the other, after a prompt."""

    def __init__(self, tokenizer: TokenSpeller, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids)
        self._is_start = self._detokenizer.is_start
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._n_shown = self._min_offset = 0

    def look(self, token_id: int) -> TokenText:
        """Return a token as if it came next."""
        data = self._tokenizer.token_bytes(token_id)
        if self._is_start and data[:1] == b" ":
            # Sentencepiece's decoders drop the space before the first word of a text.
            data = data if self._tokenizer.decode([token_id])[:1] == " " else data[1:]
        return TokenText(shown(self._tokenizer, token_id, data), data, self._offset_of(data))

    def _offset_of(self, data: bytes) -> int:
        """Return the offset of the character that these bytes begin in.

        Text that is held back consists of bytes of a character that these may continue, or U+FFFDs.
        """
        is_character = self._utf8.getstate()[0] and (not data or 0x80 <= data[0] < 0xC0)
        n_held_back = 0 if is_character else self._detokenizer.num_withheld
        return max(self._min_offset, self._n_shown + n_held_back)

    def push(self, token_id: int) -> TokenText:
        """Append the next token and return it."""
        token = self.look(token_id)
        self._is_start = self._is_start and not self._tokenizer.token_bytes(token_id)
        self._min_offset = token.offset
        self._utf8.decode(token.data)
        self._n_shown += len(self._detokenizer.push(token_id))
        return token

    def keys(self, token_ids: Sequence[int], chosen: int) -> dict[str, int]:
        """Return unique names of possible next tokens: texts, or vLLM's `token_id:N` if the chosen
        token, or an earlier one, has the same text."""
        owners: dict[str, int] = {}
        for token_id in (chosen, *token_ids):
            owners.setdefault(self.look(token_id).text, token_id)
        named = {token_id: text for text, token_id in owners.items()}
        return {named.get(token_id, f"token_id:{token_id}"): token_id for token_id in token_ids}


def shown(tokenizer: TokenSpeller, token_id: int, data: bytes) -> str:
    r"""Return a token's text; OpenAI's form `bytes:\xe2\x96` where its bytes are no text by
    themselves, and the token's name where it has no bytes, as a control token."""
    if not data:
        return tokenizer.token_name(token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
