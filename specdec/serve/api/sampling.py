"""From the fields of a request to SamplingParams, within the server's limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from specdec.sampling.params import MAX_LOGIT_BIAS, SEED_LIMIT, SamplingParams
from specdec.serve.api.base import Sampling
from specdec.serve.errors import bad_request
from specdec.serve.options import ServeOptions

_DEFAULT_TEMPERATURE = 1.0  # OpenAI's
_ANY_SEED = -1  # llama.cpp's value for a new one each time
_SAME_NAME = (
    "top_p",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
    "stop_token_ids",
)

Encode = Callable[[str], list[int]]


def sampling_params(
    body: Sampling, max_tokens: int | None, limits: ServeOptions, encode: Encode
) -> SamplingParams:
    """Return the parameters of a request.

    max_tokens: tokens that the request asks for; negative or None: as many as there may be.
    encode: returns the tokens of a text, for biases of texts.

    Raises ApiError, ConfigError.
    """
    values = {name: getattr(body, name) for name in _SAME_NAME if getattr(body, name) is not None}
    temperature = _DEFAULT_TEMPERATURE if body.temperature is None else body.temperature
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    biases = dict(_biases(body, encode))
    max_tokens = _clamped(max_tokens, limits)
    return SamplingParams(
        **values,
        temperature=temperature,
        top_k=max(body.top_k or 0, 0),  # -1 is vLLM's value for none
        max_tokens=max_tokens,
        min_tokens=min(body.min_tokens or 0, max_tokens),
        repetition_penalty=_repetition_penalty(body),
        stop=tuple(stops),
        seed=None if body.seed in (None, _ANY_SEED) else body.seed % SEED_LIMIT,
        logit_bias=tuple((i, bias) for i, bias in biases.items() if bias is not None),
        suppress_tokens=tuple(i for i, bias in biases.items() if bias is None),
    )


def requested_tokens(body: Sampling, *, may_be_zero: bool = False) -> int | None:
    """Return the length that a request asks for, by the newest of its names; None if it does not.

    Raises ApiError for a length of nothing, unless that is allowed.
    """
    for name in ("max_completion_tokens", "max_tokens", "n_predict"):
        value: int | None = getattr(body, name, None)
        if value == 0 and not may_be_zero:
            raise bad_request(f"{name} is 0: ask for at least one token, or leave it out", name)
        if value is not None:
            return value
    return None


def is_length_open(body: Sampling) -> bool:
    """Return whether a request leaves its length to the server."""
    requested = requested_tokens(body, may_be_zero=True)
    return requested is None or requested < 0


def _clamped(max_tokens: int | None, limits: ServeOptions) -> int:
    if max_tokens is None or max_tokens < 0:
        return limits.output_limit
    return min(max_tokens, limits.output_limit)


def _repetition_penalty(body: Sampling) -> float:
    """Return the penalty; raises ApiError where it would have to forget, as it cannot here."""
    given = body.repeat_penalty if body.repetition_penalty is None else body.repetition_penalty
    if given in (None, 1.0) or body.repeat_last_n == 0:
        return 1.0
    if body.repeat_last_n not in (None, -1):
        raise bad_request(
            f"repeat_last_n is {body.repeat_last_n}, but repeat_penalty counts the whole text "
            "here: send -1, or no penalty",
            "repeat_last_n",
        )
    return given or 1.0


def _biases(body: Sampling, encode: Encode) -> Iterator[tuple[int, float | None]]:
    """Yield (token, bias); None bans the token."""
    if isinstance(body.logit_bias, dict):
        yield from ((int(key), bias) for key, bias in body.logit_bias.items())
        return
    for i, (key, bias) in enumerate(body.logit_bias or ()):
        param = f"logit_bias.{i}"
        if isinstance(key, bool | float) or bias is True or isinstance(bias, str):
            raise bad_request(f"{param} must be [token or text, number or false]", param)
        if isinstance(key, int) and key < 0:
            raise bad_request(f"{param}.0 must be at least 0", param)
        if abs(bias) > MAX_LOGIT_BIAS:
            raise bad_request(f"{param}.1 must be from -{MAX_LOGIT_BIAS:g} to that", param)
        for token in [key] if isinstance(key, int) else encode(key):
            yield token, None if bias is False else float(bias)


def with_few_logprobs(
    body: Sampling,
    params: SamplingParams,
    num_sequences: int,
    num_prompt_tokens: int,
    limits: ServeOptions,
) -> SamplingParams:
    """Limit log-probabilities, each of which takes half a kilobyte until the answer is sent.

    A sequence whose length the request leaves open ends where there would be too many.

    num_prompt_tokens: those of all choices, each of which has its prompt's.
    """
    k = params.prompt_logprobs
    num_of_prompts = 0 if k is None else num_prompt_tokens * (1 + k)
    if num_of_prompts > limits.max_logprobs:
        raise bad_request(
            f"the prompt has {num_of_prompts} log-probabilities, this server gives at most "
            f"{limits.max_logprobs}: shorten it, or lower n or prompt_logprobs",
            "prompt_logprobs" if body.prompt_logprobs else "logprobs",
        )
    if not params.logprobs:
        return params
    per_token = num_sequences * (1 + int(params.logprobs))
    max_tokens = max(1, (limits.max_logprobs - num_of_prompts) // per_token)
    if params.max_tokens <= max_tokens:
        return params
    if is_length_open(body):
        return params.replace(max_tokens=max_tokens)
    raise bad_request(
        f"the request asks for {per_token * params.max_tokens + num_of_prompts} "
        f"log-probabilities, this server gives at most {limits.max_logprobs}: lower max_tokens, n "
        "or top_logprobs",
        "logprobs",
    )


def check_choices(n_choices: int, limits: ServeOptions) -> None:
    if n_choices > limits.max_choices:
        raise bad_request(
            f"the request asks for more than {limits.max_choices} sequences, the most that this "
            "server gives: lower n, or send several requests",
            "n",
        )


def stream_fields(body: Sampling) -> dict[str, Any]:
    """Return fields of a Job about the stream. Options of a stream have no effect without one."""
    given = body.stream_options
    return {
        "streams_output": bool(body.stream),
        "tells_usage": given is not None and bool(given.include_usage),
        "tells_draft": given is not None and bool(given.include_draft),
        "tells_timings": bool(body.timings_per_token),
        "tells_progress": bool(body.return_progress),
    }
