"""Log-probabilities of tokens in OpenAI's two formats: chat and completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.text.token_strings import TokenStrings, TokenText

_LOWEST_LOGPROB = -9999.0  # OpenAI's; JSON has no infinity

Likeliest = Mapping[int, float]
"""Map of token id to log p, the likeliest first."""


def chat_logprobs(
    strings: TokenStrings,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    top: Sequence[Likeliest] | None,
    n_top: int | None = None,
) -> dict[str, Any]:
    """Return a chat's logprobs. n_top: limit, as `top` may have the chosen token in addition."""
    content = []
    for position, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        likeliest = list(top[position].items())[:n_top] if top else []
        top_logprobs = [_entry(strings.look(other), log_p) for other, log_p in likeliest]
        content.append({**_entry(strings.push(token_id), logprob), "top_logprobs": top_logprobs})
    return {"content": content, "refusal": None}


def _entry(token: TokenText, logprob: float) -> dict[str, Any]:
    return {"token": token.text, "logprob": _finite(logprob), "bytes": list(token.data)}


def completion_logprobs(
    strings: TokenStrings,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    top: Sequence[Likeliest] | None,
) -> dict[str, Any]:
    tokens, likeliest = [], []
    for position, token_id in enumerate(token_ids):
        if top is not None:
            keys = strings.keys(list(top[position]), token_id)
            likeliest.append({key: _finite(top[position][other]) for key, other in keys.items()})
        tokens.append(strings.push(token_id))
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [_finite(logprob) for logprob in logprobs],
        "top_logprobs": None if top is None else likeliest,
        "text_offset": [token.offset for token in tokens],
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
