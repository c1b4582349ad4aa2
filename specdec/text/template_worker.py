"""Worker process that renders chat templates in jinja2's sandbox: a line in, a line out.

The environment matches transformers', so that the templates of Hugging Face checkpoints, which GGUF
files contain too, give the same text.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from offload.process.expendable import allow_cpu_seconds, become_expendable

MAX_BYTES = 512 << 20
MAX_CPU_SECONDS = 5
MAX_CHARACTERS = 16 << 20


def main() -> None:
    """Answer every line of stdin, a JSON object of `_render`'s arguments, with an object that has a
    `text` or an `error`."""
    become_expendable(MAX_BYTES)
    for line in sys.stdin.buffer:
        allow_cpu_seconds(MAX_CPU_SECONDS)
        answer = _answer(json.loads(line))
        sys.stdout.buffer.write(json.dumps(answer).encode("ascii") + b"\n")
        sys.stdout.buffer.flush()


def _answer(request: Mapping[str, Any]) -> dict[str, str]:
    try:
        text = _render(**request)
    except MemoryError:
        os._exit(1)  # no cleanup: memory is full
    except Exception as error:  # templates are programs of the checkpoint
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return {"error": reason[0]}
    if len(text) > MAX_CHARACTERS:
        return {"error": f"it gives {len(text)} characters, more than {MAX_CHARACTERS}"}
    return {"text": text}


def _render(
    template: str,
    messages: Any,
    special_tokens: Mapping[str, Any],
    tools: Any,
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    own = {
        "messages": messages,
        "tools": tools,
        "add_generation_prompt": add_generation_prompt,
        **special_tokens,
    }
    text: str = _compile(template).render({"documents": None, **variables, **own})
    return text


@lru_cache(maxsize=4)
def _compile(template: str) -> Any:
    return template_environment().from_string(template)


@lru_cache(maxsize=1)
def template_environment() -> Any:
    """Return the sandboxed jinja2 environment of chat templates.

    Its `parse` runs nothing; compiling already computes constant expressions of the template.
    """
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Extension for {% generation %}, which marks text for training: here it has no effect."""

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
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Dump plain JSON; jinja2's own filter escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
