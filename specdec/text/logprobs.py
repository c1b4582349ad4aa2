"""Log-probabilities of tokens in OpenAI's two formats: chat and completion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from specdec.text.contract import TokenSpeller
from specdec.text.token_strings import TokenStrings, TokenText

_LOWEST_LOGPROB = -9999.0  # OpenAI's; JSON has no infinity

Likeliest = Mapping[int, float]
"""Map of token id to log p, the likeliest first."""


class RankedLogprob(Protocol):
    """Log-probability of a token at its position, and its rank among all."""

    @property
    def logprob(self) -> float: ...

    @property
    def rank(self) -> int: ...


PromptLogprobs = Sequence[Mapping[int, RankedLogprob] | None]
"""Entries of a prompt's tokens, by token id; None for the first one."""


class ScoredTokens(NamedTuple):
    """Tokens of a text with their log-probabilities, as `completion_logprobs` takes them; None for
    a prompt's first token."""

    token_ids: Sequence[int]
    logprobs: Sequence[float | None]
    top: Sequence[Likeliest | None] | None


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
    logprobs: Sequence[float | None],
    top: Sequence[Likeliest | None] | None,
) -> dict[str, Any]:
    tokens: list[TokenText] = []
    likeliest: list[dict[str, float] | None] = []
    for position, token_id in enumerate(token_ids):
        if top is not None:
            entries = top[position]
            keys = {} if entries is None else strings.keys(list(entries), token_id)
            named = {key: _finite((entries or {})[other]) for key, other in keys.items()}
            likeliest.append(None if entries is None else named)
        tokens.append(strings.push(token_id))
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [None if logprob is None else _finite(logprob) for logprob in logprobs],
        "top_logprobs": None if top is None else likeliest,
        "text_offset": [token.offset for token in tokens],
    }


def with_prompt(
    prompt_ids: Sequence[int], prompt: PromptLogprobs, new: ScoredTokens, n_top: int
) -> ScoredTokens:
    """Return the tokens of a prompt and of its completion, as OpenAI's `echo` has them."""
    top: list[Likeliest | None] = []
    logprobs: list[float | None] = []
    for token_id, entries in zip(prompt_ids, prompt, strict=True):
        logprobs.append(None if entries is None else entries[token_id].logprob)
        top.append(
            None
            if entries is None
            else {
                other: entry.logprob
                for other, entry in entries.items()
                if entry.rank <= n_top or other == token_id
            }
        )
    return ScoredTokens(
        [*prompt_ids, *new.token_ids],
        [*logprobs, *new.logprobs],
        None if new.top is None else [*top, *new.top],
    )


def prompt_logprobs(
    tokenizer: TokenSpeller, prompt_ids: Sequence[int], prompt: PromptLogprobs, n_top: int
) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: for each token {id: {logprob, rank, decoded_token}}."""
    strings = TokenStrings(tokenizer)

    def entries() -> Iterator[dict[str, Any] | None]:
        for token_id, ranked in zip(prompt_ids, prompt, strict=True):
            yield (
                None
                if ranked is None
                else {
                    str(other): {
                        "logprob": _finite(entry.logprob),
                        "rank": entry.rank,
                        "decoded_token": strings.look(other).text,
                    }
                    for other, entry in ranked.items()
                    if entry.rank <= n_top or other == token_id
                }
            )
            strings.push(token_id)

    return list(entries())


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
