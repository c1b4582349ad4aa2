"""Log-probabilities of tokens in OpenAI's two shapes: that of a chat and that of a completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.text.token_strings import TokenStrings, TokenText

_LOWEST_LOGPROB = -9999.0  # OpenAI's; JSON has no infinity

Likeliest = Mapping[int, float]
"""{token id: log p}, the likeliest first."""


def chat_logprobs(
    strings: TokenStrings,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    top: Sequence[Likeliest] | None,
    n_top: int | None = None,
) -> dict[str, Any]:
    """n_top: so many of the likeliest ones are told, as `top` may hold the chosen token besides."""
    content = []
    for position, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        likeliest = list(top[position].items())[:n_top] if top else []
        rest = [_entry(strings.look(item), its_logprob) for item, its_logprob in likeliest]
        content.append({**_entry(strings.push(token_id), logprob), "top_logprobs": rest})
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
            likeliest.append({key: _finite(top[position][item]) for key, item in keys.items()})
        tokens.append(strings.push(token_id))
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [_finite(logprob) for logprob in logprobs],
        "top_logprobs": None if top is None else likeliest,
        "text_offset": [token.offset for token in tokens],
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
