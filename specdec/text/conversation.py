"""Encoding of messages to token ids, and the token that ends a turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from backends.contract.backend import one_line
from specdec.text.chat_format import (
    DEFAULT_OPTIONS,
    ChatTemplateError,
    TemplateOptions,
    plain_transcript,
)
from specdec.text.chat_template import render_chat
from specdec.text.contract import ChatTokenizer, TokenizerError
from specdec.text.control_tokens import MarkedContents, TextPiece

_ANSWER = "an answer of the model"  # placeholder to find what a template writes after an answer
_END_MARK = "END-OF-THE-CONTENT-TO-CONTINUE"
_TALK = ({"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER})


def encode_conversation(
    tokenizer: ChatTokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any],
    options: TemplateOptions = DEFAULT_OPTIONS,
) -> list[int]:
    """Return the token ids of a conversation in the tokenizer's chat format.

    The template writes control tokens; control tokens written out in messages and tools are
    ordinary text, unless the format says otherwise.

    Raises TokenizerError.
    """
    pieces = _pieces(tokenizer, messages, tools, options)
    # A template writes the special tokens itself.
    is_plain = tokenizer.chat_format.template is None
    if len(pieces) == 1 and pieces[0].parse_special:
        return tokenizer.encode(pieces[0].text, add_special_tokens=is_plain)
    ids: list[int] = []
    for i, piece in enumerate(pieces):
        if piece.parse_special:
            ids += tokenizer.encode(piece.text, add_special_tokens=False, is_start=i == 0)
        else:
            ids += _encode_as_text(tokenizer, piece.text, is_plain, is_start=i == 0)
    return ids


def render_conversation(
    tokenizer: ChatTokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] = (),
    options: TemplateOptions = DEFAULT_OPTIONS,
) -> str:
    """Return the text of a conversation in the tokenizer's chat format. Raises TokenizerError."""
    return "".join(piece.text for piece in _pieces(tokenizer, messages, tools, options))


def _pieces(
    tokenizer: ChatTokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any],
    options: TemplateOptions,
) -> list[TextPiece]:
    if tools and not tokenizer.chat_format.knows_tools:
        raise TokenizerError(
            "the model has no chat template that describes tools: leave them out, "
            "take a model made for tools, or name a template with --chat-template"
        )
    if options.continues_last:
        messages = _with_end_mark(messages)
    try:
        marked = _marked(tokenizer, messages, tools, options)
        contents, shown_tools, variables = marked.value
        text = _render(tokenizer, contents, shown_tools, replace(options, variables=variables))
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"the conversation holds {error.object[error.start]!a}, half of a character: give "
            "valid Unicode"
        ) from error
    except Exception as error:  # whatever a program of the checkpoint does
        raise TokenizerError(f"the model's chat template failed: {one_line(error)}") from error
    return marked.pieces(_without_end(text) if options.continues_last else text)


def _with_end_mark(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with a mark behind the last one's content, which the answer continues."""
    last = messages[-1]
    return [*messages[:-1], {**last, "content": f"{last['content']}{_END_MARK} "}]


def _without_end(text: str) -> str:
    """Return a rendered text up to the mark. Raises TokenizerError."""
    before, mark, after = text.rpartition(_END_MARK)
    if not mark:
        raise TokenizerError(
            "the model's chat template drops or rewrites the last message, so the answer cannot "
            "continue it: end with a message of the user"
        )
    is_stripped = not after.startswith(" ")  # as transformers tells whether a template does that
    return before.rstrip() if is_stripped else before


def _encode_as_text(
    tokenizer: ChatTokenizer, text: str, add_special_tokens: bool, is_start: bool
) -> list[int]:
    """Return the token ids of a text without control tokens, except those added at its ends."""

    def encode(add_special_tokens: bool) -> list[int]:
        return tokenizer.encode(
            text,
            add_special_tokens=add_special_tokens,
            parse_special=False,
            is_start=is_start,
        )

    bare = encode(False)
    framed = encode(True) if add_special_tokens else bare
    control = {
        token.token_id: name for name, token in tokenizer.added_tokens.items() if token.is_control
    }
    if control.keys().isdisjoint(bare):
        return framed
    # SentencePiece has control tokens among its ordinary pieces.
    spelled = _Spelling(tokenizer, control)
    at = next(i for i in range(len(framed)) if framed[i : i + len(bare)] == bare)
    as_text = [j for i in bare for j in (spelled(control[i]) if i in control else [i])]
    return [*framed[:at], *as_text, *framed[at + len(bare) :]]


class _Spelling:
    """Spelling of a text by tokens of single characters, or of their bytes."""

    def __init__(self, tokenizer: ChatTokenizer, control: Mapping[int, str]) -> None:
        ids = (i for i in range(tokenizer.n_tokens) if i not in control)
        self._ids = {tokenizer.token_name(i): i for i in ids}

    def __call__(self, text: str) -> list[int]:
        result: list[int] = []
        for letter in text:
            names = [letter] if letter in self._ids else [f"<0x{b:02X}>" for b in letter.encode()]
            if not all(name in self._ids for name in names):
                raise TokenizerError(
                    f"a message holds {text!r}, which this tokenizer knows only as a control "
                    "token: leave it out, or set --parse-special"
                )
            result += [self._ids[name] for name in names]
        return result


def _marked(
    tokenizer: ChatTokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any],
    options: TemplateOptions,
) -> MarkedContents:
    form = tokenizer.chat_format
    added = {} if form.parse_special else tokenizer.added_tokens
    template = form.template_for(bool(tools)) or ""
    contents = [list(messages), list(tools), dict(options.variables)]
    return MarkedContents(added, contents, template)


def _render(
    tokenizer: ChatTokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any],
    options: TemplateOptions,
) -> str:
    template = tokenizer.chat_format.template_for(bool(tools))
    ends_open = options.add_generation_prompt and not options.continues_last
    if template is None:
        return plain_transcript(messages, add_generation_prompt=ends_open)
    return render_chat(
        template,
        messages,
        tokenizer.template_tokens,
        tools,
        add_generation_prompt=ends_open,
        variables=options.variables,
    )


def end_of_turn(tokenizer: ChatTokenizer) -> int | None:
    """Return the added token that the chat template writes after an answer; None where it writes
    none, or refuses a short conversation."""
    template, added = tokenizer.chat_format.template, tokenizer.added_tokens
    if template is None:
        return None
    try:
        text = render_chat(template, _TALK, tokenizer.template_tokens, add_generation_prompt=False)
    except ChatTemplateError:
        return None
    _, answer, behind = text.rpartition(_ANSWER)
    if not answer:
        return None  # it drops earlier answers, or rewrites them
    behind = behind.lstrip()
    name = max((name for name in added if name and behind.startswith(name)), key=len, default=None)
    return None if name is None else added[name].token_id
