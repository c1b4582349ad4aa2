"""Conversion of a caller's prompt to token ids that fit."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from offload.errors import SpecdecError, with_names
from specdec.text.contract import ChatTokenizer

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]
"""Prompt: a text, a conversation (messages with role and content), or token ids."""


class PromptError(SpecdecError):
    """A prompt cannot be run."""


def encode_prompt(prompt: Any, tokenizer: ChatTokenizer) -> list[int]:
    """Return the token ids of a prompt, at least one. Raises PromptError, TokenizerError."""
    if isinstance(prompt, str):
        _check_text(prompt)
        ids = tokenizer.encode(prompt)
    elif not isinstance(prompt, Iterable) or isinstance(prompt, (bytes, bytearray, Mapping)):
        raise PromptError(
            f"the prompt is of type {type(prompt).__name__}: "
            "give a text, a list of messages or a list of token ids"
        )
    else:
        items = list(prompt)
        if items and all(isinstance(item, Mapping) for item in items):
            ids = _encode_chat(items, tokenizer)
        else:
            ids = [_token_id(item, tokenizer.n_tokens) for item in items]
    if not ids and isinstance(prompt, str) and prompt:
        raise PromptError(
            f"the model's tokenizer makes no tokens of the prompt {prompt[:40]!r}: it has none for "
            "these characters; write others, or take the original model's tokenizer"
        )
    if not ids:
        raise PromptError("the prompt is empty: it needs at least one token")
    return ids


def is_conversation(prompt: Any) -> bool:
    """Return whether a prompt is a list of messages."""
    return isinstance(prompt, Sequence) and isinstance(next(iter(prompt), None), Mapping)


def check_vocabulary(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise PromptError for tokens that the tokenizer has and the model lacks."""
    largest = max(token_ids)
    if largest >= vocab_size:
        raise PromptError(
            f"the prompt holds token {largest}, but the model has {vocab_size} tokens: its "
            "tokenizer is another model's"
        )


def check_context_capacity(n_tokens: int, max_context: int, model_context: int) -> None:
    """Raise PromptError, naming the limit, where a prompt fills the context."""
    if n_tokens < max_context:
        return
    limit, remedy = _context_limit(max_context, model_context)
    raise PromptError(
        f"the prompt has {n_tokens} tokens, which leaves no room in the context of "
        f"{max_context} ({limit}): shorten it{remedy}"
    )


def context_note(n_prompt: int, max_context: int, model_context: int) -> str:
    """Return the note about a sequence that was cut by the context."""
    limit, remedy = _context_limit(max_context, model_context)
    return with_names(
        f"the text was cut where the context of {max_context} tokens ({limit}) was full, "
        f"{n_prompt} of them the prompt's: shorten that{remedy}"
    )


def _context_limit(max_context: int, model_context: int) -> tuple[str, str]:
    """Return (the name of the limit, a remedy besides a shorter prompt)."""
    if max_context >= model_context:
        return "the model's maximum", ""
    return f"--ctx-size; the model has {model_context}", " or raise --ctx-size"


def _encode_chat(messages: Sequence[Mapping[str, str]], tokenizer: ChatTokenizer) -> list[int]:
    for message in messages:
        for value in message.values():
            if isinstance(value, str):
                _check_text(value)
    return tokenizer.encode_chat(messages)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # surrogates, from bytes that were not UTF-8
        raise PromptError(
            f"the prompt holds {text[error.start]!a} at position {error.start}, which is no "
            "character but a byte that was not UTF-8: give UTF-8 text"
        ) from error


def _token_id(item: Any, n_tokens: int) -> int:
    try:
        token = operator.index(item)
    except TypeError:
        token = None
    if token is None or isinstance(item, bool):
        raise PromptError(f"the prompt holds {item!r} for a token id: it must be an integer")
    if not 0 <= token < n_tokens:
        raise PromptError(f"token id {token} is outside the vocabulary of {n_tokens} tokens")
    return token
