"""Chat templates: programs of the checkpoint, run by jinja2 in its sandbox.

The environment offers what transformers' does, so that the templates of Hugging Face checkpoints,
which GGUF files carry along, give the same text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from specdec.text.chat_format import ChatTemplateError


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    tools: Sequence[Any] = (),
) -> str:
    """The text of a conversation, up to where the assistant's answer begins.

    Args:
        template: jinja2 source.
        messages: with `role` and `content`.
        special_tokens: `bos_token`, `eos_token`, ...
        tools: in OpenAI's form, for templates that tell the model of them.

    Raises:
        ChatTemplateError: whatever goes wrong in the template.
    """
    try:
        import jinja2  # noqa: F401
    except ImportError as error:
        raise ChatTemplateError(
            "chat templates need jinja2: pip install 'specdec[gguf]'"
        ) from error
    try:
        return _compile(template).render(
            messages=[dict(message) for message in messages],
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=True,
            **special_tokens,
        )
    except Exception as error:  # templates are programs of the checkpoint
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ChatTemplateError(reason[0]) from error


@lru_cache(maxsize=4)
def _compile(template: str) -> Any:
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks the assistant's text for training: here it is only text."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return datetime.now().strftime(pattern)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja2's own filter escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
