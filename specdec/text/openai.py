"""Conversion of OpenAI request bodies to messages of chat templates and to SamplingParams.

The server and the batch check bodies in different ways, and both convert them here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def template_message(role: str, content: str | Sequence[str] | None, **more: Any) -> dict[str, Any]:
    """Return a message as templates expect it, with its content as one text.

    content: a text, its parts, or None, as in an answer that called tools.
    more: other fields; None is left out.
    """
    text = content if isinstance(content, str) else "\n".join(content or ())
    given = {name: value for name, value in more.items() if value is not None}
    return {"role": "system" if role == "developer" else role, "content": text, **given}


def constraint(kind: str | None, schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the SamplingParams of response_format: without a schema, any JSON object."""
    if kind in (None, "text"):
        return {}
    return {"json_object": True} if schema is None else {"json_schema": schema}


def logprobs(requested: bool | None, n_top: int | None) -> bool | int:
    """Convert logprobs and top_logprobs of a chat. Raises ValueError for top_logprobs alone."""
    if n_top and not requested:
        raise ValueError(f"top_logprobs is {n_top}, but logprobs is not true: set it")
    return bool(requested) and (n_top or True)


def completion_logprobs(n_top: int | None) -> bool | int:
    """Convert logprobs of a completion: 0 is valid and means the chosen tokens alone."""
    return False if n_top is None else n_top or True
