"""Chat formats that turn a conversation into a prompt: a template, or a plain transcript."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offload.errors import SpecdecError
from specdec.opening import open_now

MAX_TEMPLATE_BYTES = 1 << 20
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ChatTemplateError(SpecdecError):
    """A chat template is malformed, cannot be read, or refused the conversation."""


@dataclass(frozen=True)
class ChatFormat:
    """Format of a conversation.

    template: jinja2 source; None is the plain transcript.
    stop: strings that end an answer, where the model's end-of-sequence tokens may not.
    tool_template: replaces the template where there are tools.
    parse_special: whether control tokens written out in messages are parsed; else they are text.
    """

    template: str | None
    stop: tuple[str, ...] = ()
    tool_template: str | None = None
    parse_special: bool = False

    def template_for(self, has_tools: bool) -> str | None:
        return self.tool_template if has_tools and self.tool_template else self.template

    @property
    def knows_tools(self) -> bool:
        """Whether the template describes tools to the model, rather than dropping them."""
        return "tools" in (self.template_for(has_tools=True) or "")


@dataclass(frozen=True)
class TemplateOptions:
    """How a conversation is rendered, beside its messages and tools.

    variables: variables of the template, such as `enable_thinking`; JSON values.
    add_generation_prompt: False ends after the last message.
    continues_last: the answer continues the last message, whose turn is not ended.
    """

    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continues_last: bool = False


DEFAULT_OPTIONS = TemplateOptions()
PLAIN = ChatFormat(None, ("\nUser:",))
"""Format for models without a template, which may generate the user's next question, too."""
NAMED = {"plain": PLAIN, "chatml": ChatFormat(_CHATML, ("<|im_end|>",))}


def chat_format(name: str | os.PathLike[str]) -> ChatFormat:
    """Return the format of a name in NAMED, else a file's template. Raises ChatTemplateError."""
    if name in NAMED:
        return NAMED[str(name)]
    try:
        with open_now(Path(name)) as file:
            raw = file.read(MAX_TEMPLATE_BYTES + 1)
    except OSError as error:
        raise ChatTemplateError(
            f"no chat template {str(name)!r}: {error.strerror or error}: name a file, "
            f"or one of {', '.join(NAMED)}"
        ) from error
    if len(raw) > MAX_TEMPLATE_BYTES:
        raise ChatTemplateError(
            f"the chat template {name} has more than {MAX_TEMPLATE_BYTES} bytes"
        )
    try:
        template = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ChatTemplateError(
            f"the chat template {name} is not UTF-8 at byte {error.start}: name a text file"
        ) from error
    _check_syntax(template, name)
    return ChatFormat(template)


def _check_syntax(template: str, name: str | os.PathLike[str]) -> None:
    from jinja2.exceptions import TemplateSyntaxError

    from specdec.text.template_worker import template_environment

    try:
        template_environment().parse(template)
    except RecursionError as error:
        raise ChatTemplateError(f"the chat template {name} is nested too deeply: fix it") from error
    except TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"the chat template {name} is wrong in line {error.lineno}: {error.message}: fix it"
        ) from error


def plain_transcript(
    messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
) -> str:
    """Return the conversation as `Role: text` lines, up to where the assistant's answer begins.

    The system message comes first without a role, as base models have seen many such texts.
    Raises ChatTemplateError.
    """
    lines = []
    for message in messages:
        role, content = message.get("role"), message.get("content") or ""
        if not isinstance(role, str) or not isinstance(content, str):
            raise ChatTemplateError("a message needs a role and a content, both of them texts")
        lines.append(content if role == "system" else f"{role.capitalize()}: {content}")
    return "\n".join([*lines, "Assistant:"] if add_generation_prompt else lines)
