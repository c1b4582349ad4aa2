"""What a request may ask for, beyond what its schema says: the model's limits and the server's."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.api import LLM
from specdec.sampling.params import SamplingParams
from specdec.serve.errors import bad_request
from specdec.serve.options import ServeOptions
from specdec.serve.schema import ChatRequest
from specdec.serve.schema import Sampling as SamplingFields
from specdec.text import prompts as text_prompts


def check_room(prompts: Sequence[Sequence[int]], llm: LLM) -> None:
    for ids in prompts:
        if len(ids) >= llm.max_context:
            try:
                text_prompts.check_room(len(ids), llm.max_context, llm.session.model_context)
            except Exception as error:
                raise bad_request(str(error), code="context_length_exceeded") from error


def check_choices(n_choices: int, limits: ServeOptions) -> None:
    if n_choices > limits.max_choices:
        raise bad_request(
            f"the request asks for more than {limits.max_choices} texts, the most that this "
            "server gives: lower n, or send several requests",
            "n",
        )


def with_few_logprobs(
    body: SamplingFields, params: SamplingParams, n_texts: int, limits: ServeOptions
) -> SamplingParams:
    """Each log-probability takes half a kilobyte until the answer is sent. A text whose length the
    request leaves open ends where there would be too many."""
    if not params.logprobs:
        return params
    per_token = n_texts * (1 + int(params.logprobs))
    most = max(1, limits.max_logprobs // per_token)
    if params.max_tokens <= most:
        return params
    if _is_length_open(body):
        return params.replace(max_tokens=most)
    raise bad_request(
        f"the request asks for {per_token * params.max_tokens} log-probabilities, this server "
        f"gives at most {limits.max_logprobs}: lower max_tokens, n or top_logprobs",
        "logprobs",
    )


def _is_length_open(body: SamplingFields) -> bool:
    is_chat_open = not isinstance(body, ChatRequest) or body.max_completion_tokens is None
    return body.max_tokens is None and is_chat_open
