"""The contract of tokenizers, whatever the model's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from offload.errors import SpecdecError
from specdec.text.chat_format import DEFAULT_OPTIONS, ChatFormat, TemplateOptions
from specdec.text.control_tokens import AddedToken


class TokenizerError(SpecdecError):
    """A tokenizer cannot be loaded, or lacks a requested feature."""


class TokenDecoder(Protocol):
    """The part of a tokenizer that the controller and the detokenizer need."""

    @property
    def n_tokens(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class TokenSpeller(TokenDecoder, Protocol):
    """A decoder that also describes single tokens."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that the token adds after other text; control tokens have none."""

    def token_name(self, token_id: int) -> str:
        """Return the token as it is stored, for tokens without bytes."""


class ChatTokenizer(TokenSpeller, Protocol):
    """The part of a tokenizer that a generation needs."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template; else `chat_format` is a plain transcript."""

    @property
    def chat_format(self) -> ChatFormat: ...

    @chat_format.setter
    def chat_format(self, value: ChatFormat) -> None: ...

    @property
    def added_tokens(self) -> Mapping[str, AddedToken]:
        """Added tokens by their text."""

    @property
    def template_tokens(self) -> Mapping[str, Any]:
        """Special tokens under the names of templates: `bos_token`, `eos_token`, ..."""

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        parse_special: bool = True,
        is_start: bool = True,
    ) -> list[int]:
        """Return the token ids of a text.

        add_special_tokens: add tokens such as BOS, where the model expects one; never a second one.
        parse_special: whether control tokens written out in the text are parsed as such.
        is_start: False after a control token: no space is put before the first word.
        """

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] = (),
        options: TemplateOptions = DEFAULT_OPTIONS,
    ) -> list[int]: ...

    def grammar_tokenizer(self, end_ids: tuple[int, ...]) -> Any:
        """Return llguidance's LLTokenizer of the tokens' bytes; `end_ids` end a sequence."""
