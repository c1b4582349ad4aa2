"""What a tokenizer must be able to do, and the one of a transformers checkpoint.

Nothing here imports transformers until a tokenizer is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from backends.contract.backend import one_line
from offload.errors import SpecdecError
from offload.formats.lfs import refuse_pointer
from specdec.text.chat_format import PLAIN, ChatFormat, plain_transcript
from specdec.text.chat_template import render_chat

# transformers makes a tokenizer from any of these.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)


class TokenizerError(SpecdecError):
    """A tokenizer cannot be loaded, or lacks what was asked of it."""


class TokenDecoder(Protocol):
    """The part of a tokenizer that the controller and the detokenizer need."""

    @property
    def n_tokens(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class ChatTokenizer(TokenDecoder, Protocol):
    """What a generation needs of a tokenizer, whatever the model's format."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brings one along; without one `chat_format` is a plain transcript."""

    @property
    def chat_format(self) -> ChatFormat: ...

    @chat_format.setter
    def chat_format(self, value: ChatFormat) -> None: ...

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()
    ) -> list[int]: ...

    def grammar_tokenizer(self, end_ids: tuple[int, ...]) -> Any:
        """llguidance's LLTokenizer: the bytes of each token; `end_ids` end a text."""


def encode_conversation(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any],
    render: Callable[[str, Sequence[Mapping[str, Any]], Sequence[Any]], str],
) -> list[int]:
    """Token ids of a conversation in the tokenizer's chat format.

    render: (template, messages, tools) -> text; it may raise anything, as templates are programs
        of the checkpoint.

    Raises TokenizerError.
    """
    form: ChatFormat = tokenizer.chat_format
    if tools and not form.knows_tools:
        raise TokenizerError(
            "the model has no chat template that tells a model of tools: leave them out, "
            "take a model made for tools, or name a template with --chat-template"
        )
    try:
        template = form.template_for(bool(tools))
        if template is None:
            text = plain_transcript(messages)
        else:
            text = render(template, messages, tools)
        text.encode()
    except Exception as error:
        raise TokenizerError(f"the model's chat template failed: {one_line(error)}") from error
    # A template writes the special tokens itself.
    return list(tokenizer.encode(text, add_special_tokens=template is None))


def grammar_slices() -> list[str]:
    """Of llguidance's tokenizers: the tokens that may stand anywhere in a JSON string.

    They are looked at as one where all of them may follow: that is 15 times faster. Of 150 000
    tokens such a slice takes 13 MB; the three others that it has by default are for strings of
    limited lengths.
    """
    from llguidance import LLTokenizer

    return LLTokenizer.general_slices()[-1:]


class Tokenizer:
    """A transformers tokenizer with the few operations that generation needs."""

    def __init__(self, hf_tokenizer: Any) -> None:
        self.hf_tokenizer = hf_tokenizer
        ids = hf_tokenizer.get_vocab().values()
        self._n_tokens = max(len(hf_tokenizer), max(ids, default=-1) + 1)
        own = getattr(hf_tokenizer, "chat_template", None)
        self.has_chat_template = bool(own)
        self.chat_format = _own_format(own) if own else PLAIN

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Tokenizer:
        """Load from a checkpoint directory; code that the checkpoint may carry is never run."""
        return cls(_load_hf_tokenizer(Path(path)))

    @property
    def n_tokens(self) -> int:
        """Ids from here on are padding rows of the vocabulary: they have no text."""
        return self._n_tokens

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's end-of-sequence id, if it has one (a model may define more)."""
        eos = self.hf_tokenizer.eos_token_id
        return () if eos is None else (int(eos),)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = self.hf_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return [int(i) for i in ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens; special tokens have none."""
        return str(
            self.hf_tokenizer.decode(
                list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer."""
        return encode_conversation(self, messages, tools, self._render)

    def _render(
        self, template: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
    ) -> str:
        return render_chat(template, messages, self.hf_tokenizer.special_tokens_map, tools)

    def grammar_tokenizer(self, end_ids: tuple[int, ...]) -> Any:
        """llguidance's LLTokenizer of this vocabulary. Raises ValueError where it has none."""
        from llguidance.hf import from_tokenizer

        ends, slices = list(end_ids), grammar_slices()
        return from_tokenizer(self.hf_tokenizer, eos_token=ends, slices=slices)


def _own_format(template: Any) -> ChatFormat:
    """Of several templates transformers takes these two. Raises TokenizerError."""
    named = template if isinstance(template, dict) else {"default": template}
    for text in named.values():
        if not isinstance(text, str):
            raise TokenizerError(
                f"chat_template in tokenizer_config.json is {text!r:.60}, must be a text: "
                "take the tokenizer files of the original model, or remove that line"
            )
    default = named.get("default") or next(iter(named.values()))
    return ChatFormat(default, tool_template=named.get("tool_use"))


def _load_hf_tokenizer(directory: Path) -> Any:
    """transformers' tokenizer; code that the checkpoint may carry is never run."""
    from transformers import AutoTokenizer

    _require_tokenizer_files(directory)
    try:
        return AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
    except Exception as error:  # whatever a broken file makes the libraries raise
        raise TokenizerError(
            f"cannot load a tokenizer from {directory}: {one_line(error)}: "
            "take the tokenizer files of the original model"
        ) from error


def _require_tokenizer_files(directory: Path) -> None:
    """Raise TokenizerError where transformers would only list what it tried."""
    for name in _TOKENIZER_FILES:
        refuse_pointer(directory / name)
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise TokenizerError(
            f"{directory} has no tokenizer.json (nor {', '.join(_TOKENIZER_FILES[1:])}): "
            "copy the tokenizer files of the original model there"
        )
    settings = directory / "tokenizer_config.json"
    if not settings.is_file():
        return
    try:
        is_object = isinstance(json.loads(settings.read_bytes()), dict)
    except (OSError, ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise TokenizerError(
            f"{settings} is not a JSON object: take the file of the original model"
        )
