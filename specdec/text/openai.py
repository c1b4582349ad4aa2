"""What OpenAI's bodies say, in the words of chat templates and of SamplingParams.

The server and the batch check bodies each in its own way, and read them in this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def template_message(role: str, content: str | Sequence[str] | None, **more: Any) -> dict[str, Any]:
    """A message as templates expect it, whose content is one text.

    content: a text, its parts, or None, as of an answer that called tools.
    more: what else it has; None is left out.
    """
    text = content if isinstance(content, str) else "\n".join(content or ())
    given = {name: value for name, value in more.items() if value is not None}
    return {"role": "system" if role == "developer" else role, "content": text, **given}


def constraint(kind: str | None, schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """response_format: without a schema any JSON object will do."""
    if kind in (None, "text"):
        return {}
    return {"json_object": True} if schema is None else {"json_schema": schema}


def logprobs(requested: bool | None, n_top: int | None) -> bool | int:
    """logprobs and top_logprobs of a chat. Raises ValueError where there are only the second."""
    if n_top and not requested:
        raise ValueError(f"top_logprobs is {n_top}, but logprobs is not true: set it")
    return bool(requested) and (n_top or True)


def completion_logprobs(n_top: int | None) -> bool | int:
    """logprobs of a completion: 0 is a number here, of the chosen tokens alone."""
    return False if n_top is None else n_top or True
