"""Maximum new tokens of a sequence, and the note if the context limits them."""

from __future__ import annotations

from typing import NamedTuple

from specdec.checks import ConfigError, FieldName
from specdec.sampling.params import SamplingParams
from specdec.text.prompts import context_note


class TokenLimit(NamedTuple):
    """Maximum new tokens, and the note for a sequence that ends there, if any."""

    n_tokens: int
    note: str | None


def token_limit(
    params: SamplingParams, n_prompt: int, max_context: int, model_context: int
) -> TokenLimit:
    """Return the limit of new tokens. Raises ConfigError if the prompt alone reaches max_length."""
    limit = params.token_limit(n_prompt)
    if limit < 1:
        raise ConfigError(
            FieldName("max_length"),
            f" is {params.max_length}, but the prompt alone has {n_prompt} tokens: raise it, or "
            "set max_tokens",
        )
    n_left = max_context - n_prompt
    if limit <= n_left:
        return TokenLimit(limit, None)
    return TokenLimit(n_left, context_note(n_prompt, max_context, model_context))
