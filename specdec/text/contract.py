"""The contract of tokenizers, whatever the model's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from offload.errors import SpecdecError
from specdec.text.chat_format import ChatFormat
from specdec.text.control_tokens import AddedToken


class TokenizerError(SpecdecError):
    """A tokenizer cannot be loaded, or lacks what was asked of it."""


class TokenDecoder(Protocol):
    """The part of a tokenizer that the controller and the detokenizer need."""

    @property
    def n_tokens(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class TokenSpeller(TokenDecoder, Protocol):
    """One that tells of single tokens, too."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds behind other text; control tokens have none."""

    def token_name(self, token_id: int) -> str:
        """The token as it is stored, for those without bytes."""


class ChatTokenizer(TokenSpeller, Protocol):
    """The part of a tokenizer that a generation needs."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brings one along; without one `chat_format` is a plain transcript."""

    @property
    def chat_format(self) -> ChatFormat: ...

    @chat_format.setter
    def chat_format(self, value: ChatFormat) -> None: ...

    @property
    def added_tokens(self) -> Mapping[str, AddedToken]:
        """By their sequences."""

    @property
    def template_tokens(self) -> Mapping[str, Any]:
        """`bos_token`, `eos_token`, ... as templates know them."""

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        parse_special: bool = True,
        is_start: bool = True,
    ) -> list[int]:
        """Token ids of a text.

        add_special_tokens: such as a BOS token, where the model wants one; never a second one.
        parse_special: whether control tokens written out in the text are such.
        is_start: False behind a control token: nothing is put before its first word.
        """

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()
    ) -> list[int]: ...

    def grammar_tokenizer(self, end_ids: tuple[int, ...]) -> Any:
        """llguidance's LLTokenizer: the bytes of each token; `end_ids` end a text."""
