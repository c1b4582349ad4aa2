"""Conversion of requests to what the LLM takes, within the model's limits and the server's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec.api import LLM
from specdec.dialogue.formats import OutputFormat
from specdec.dialogue.prompt import AnswerOptions, Dialogue, DialoguePrompt
from specdec.grammar.constraint import Constraint
from specdec.sampling.params import SamplingParams
from specdec.sampling.processors import NumpyProcessor
from specdec.serve.api.base import Sampling
from specdec.serve.api.chat import ChatRequest, ConversationFields
from specdec.serve.api.completions import CompletionRequest
from specdec.serve.api.constraints import constraint_fields, constraint_to_try
from specdec.serve.api.conversation import (
    functions,
    is_call_forced,
    offered_tools,
    template_messages,
    template_options,
)
from specdec.serve.api.sampling import (
    check_choices,
    requested_tokens,
    sampling_params,
    stream_fields,
    with_few_logprobs,
)
from specdec.serve.errors import bad_request
from specdec.serve.options import ServeOptions
from specdec.text import openai
from specdec.text.prompts import check_context_capacity, encode_prompt

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, of /v1/completions


@dataclass(frozen=True)
class JobHead:
    """The part of a job that its answer is written from.

    n_choices: sequences of the answer. n_per_prompt: of these, sequences of one prompt.
    echoed: texts of the prompts, if the answer repeats them.
    """

    n_choices: int = 1
    n_per_prompt: int = 1
    num_prompt_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    echoed: tuple[str, ...] = ()
    streams_output: bool = False
    tells_usage: bool = False
    """Whether the last event of a stream has the usage."""
    tells_progress: bool = False
    """Whether a stream tells of the prompt's progress."""


@dataclass(frozen=True)
class Job:
    """A request as the LLM takes it.

    n_copies: copies of each sequence in the answer, for greedy decoding gives n equal ones.
    form: format of the text, which is parsed; None is text only.
    """

    prompts: tuple[list[int], ...]
    params: SamplingParams
    priority: int = 0
    n_copies: int = 1
    form: OutputFormat | None = None
    processors: tuple[NumpyProcessor, ...] = ()
    """Logits processors of its prompts."""
    echoed: tuple[str, ...] = ()
    """Texts of the prompts, if the answer repeats them."""
    includes_stop: bool = False
    """Whether the text ends with the stop string that ended it."""
    tells_reasoning: bool = True
    """Whether the answer has the reasoning."""
    caches_prompt: bool = True
    prompt_logprobs: int | None = None
    """Number of likeliest tokens at each position of the prompt, if the answer has their
    log-probabilities."""
    echoes_logprobs: bool = False
    """Whether the log-probabilities begin with those of the prompt."""
    drops_output: bool = False
    """Whether the answer has nothing but the echoed prompt."""
    has_chat_logprobs: bool = True
    """Whether log-probabilities have the shape of a chat's, else that of a completion's."""
    streams_output: bool = False
    tells_usage: bool = False
    """Whether the last event of a stream has the usage."""
    tells_draft: bool = False
    """Whether events say how much of their text was drafted."""
    tells_timings: bool = False
    """Whether events have the timings so far."""
    tells_progress: bool = False
    """Whether a stream tells of the prompt's progress."""

    @property
    def n_choices(self) -> int:
        return len(self.prompts) * self.n_per_prompt

    @property
    def n_per_prompt(self) -> int:
        return self.params.n * self.n_copies

    @property
    def head(self) -> JobHead:
        return JobHead(
            n_choices=self.n_choices,
            n_per_prompt=self.n_per_prompt,
            num_prompt_tokens=sum(map(len, self.prompts)),
            temperature=self.params.temperature,
            top_p=self.params.top_p,
            echoed=self.echoed,
            streams_output=self.streams_output,
            tells_usage=self.tells_usage,
            tells_progress=self.tells_progress,
        )


def request_job(body: ChatRequest | CompletionRequest, llm: LLM, limits: ServeOptions) -> Job:
    """Return the job of a request, whose `request_constraint` must have been tried before.

    Raises ApiError, SpecdecError.
    """
    if isinstance(body, ChatRequest):
        return chat_job(body, llm, limits)
    return completion_job(body, llm, limits)


def request_constraint(body: ChatRequest | CompletionRequest) -> Constraint | None:
    """Return the client's constraint, which must be tried in another process first; None if there
    is none. Raises ApiError, ConfigError."""
    if isinstance(body, ChatRequest):
        return chat_constraint(body)
    return completion_constraint(body)


def chat_job(body: ChatRequest, llm: LLM, limits: ServeOptions) -> Job:
    """See `request_job`."""
    tools, is_forced = offered_tools(body), is_call_forced(body)
    given = sampling_params(body, requested_tokens(body), limits, _encoder(llm))
    params = llm.session.chat_params(given)
    try:
        params = params.replace(logprobs=openai.logprobs(body.logprobs, body.top_logprobs))
    except ValueError as error:
        raise bad_request(str(error), "top_logprobs") from error
    params = params.replace(**constraint_fields(body, tools if is_forced else ()))
    prompt_logprobs = _prompt_logprobs(body)
    params = params.replace(prompt_logprobs=prompt_logprobs)
    dialogue = Dialogue(llm.tokenizer)
    prompt = dialogue.encode(
        template_messages(body),
        offered_tool_fields(body),
        template_options(body),
        AnswerOptions(
            separates_reasoning=body.reasoning_format != "none",
            max_calls=1 if body.parallel_tool_calls is False else None,
            is_constrained=params.constraint is not None,
            is_call_forced=is_forced,
        ),
    )
    _check_context([prompt.ids], llm)
    return _job(
        body,
        [prompt.ids],
        params,
        limits,
        form=prompt.form,
        prompt_logprobs=prompt_logprobs,
        processors=() if params.constraint else _reasoning_limit(body, dialogue, prompt),
        tells_reasoning=body.include_reasoning is not False,
    )


def _prompt_logprobs(body: Sampling) -> int | None:
    """Return the likeliest tokens at each position of the prompt; None for no log-probabilities.

    Raises ApiError for a stream, as vLLM does.
    """
    given = body.prompt_logprobs
    if given is None or given is False:
        return None
    if body.stream:
        raise bad_request(
            "prompt_logprobs are not in a stream: send stream: false", "prompt_logprobs"
        )
    return int(given)


def _reasoning_limit(
    body: ChatRequest, dialogue: Dialogue, prompt: DialoguePrompt
) -> tuple[NumpyProcessor, ...]:
    n = body.reasoning_budget or 0
    budget = dialogue.reasoning_budget(prompt, n) if n > 0 else None
    return () if budget is None else (budget,)


def chat_constraint(body: ChatRequest) -> Constraint | None:
    """See `request_constraint`."""
    forced = offered_tools(body) if is_call_forced(body) else []
    return constraint_to_try(constraint_fields(body, forced))


def offered_tool_fields(body: ChatRequest) -> list[dict[str, Any]]:
    """Return the tools that are shown to the model, as templates take them. Raises ApiError."""
    return [tool.model_dump(exclude_none=True) for tool in offered_tools(body)]


def conversation_ids(body: ConversationFields, llm: LLM, tools: Sequence[Any]) -> list[int]:
    """Return the tokens of a conversation. Raises ApiError, SpecdecError."""
    dialogue = Dialogue(llm.tokenizer)
    return dialogue.encode(template_messages(body), tools, template_options(body)).ids


def conversation_text(body: ConversationFields, llm: LLM) -> str:
    """Return the text of a conversation as its template renders it. Raises ApiError,
    SpecdecError."""
    tools = [tool.model_dump(exclude_none=True) for tool in functions(body.tools)]
    options = template_options(body)
    return Dialogue(llm.tokenizer).render(template_messages(body), tools, options)


def completion_job(body: CompletionRequest, llm: LLM, limits: ServeOptions) -> Job:
    """See `request_job`."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_request("best_of is not supported, unless it equals n: leave it out", "best_of")
    default = min(_DEFAULT_COMPLETION_TOKENS, limits.output_limit)
    requested = requested_tokens(body, may_be_zero=bool(body.echo))
    max_tokens = default if requested is None else requested or 1
    params = sampling_params(body, max_tokens, limits, _encoder(llm))
    n_top = body.n_probs or None if body.logprobs is None else body.logprobs
    params = params.replace(logprobs=openai.completion_logprobs(n_top), **constraint_fields(body))
    prompts: Sequence[Any] = [body.prompt] if _is_one(body.prompt) else body.prompt
    check_choices(len(prompts) * (body.n or 1), limits)
    ids = [encode_prompt(prompt, llm.tokenizer) for prompt in prompts]
    _check_context(ids, llm)
    echoed: tuple[str, ...] = ()
    prompt_logprobs = _prompt_logprobs(body)
    if body.echo:
        echoed = tuple(
            prompt if isinstance(prompt, str) else llm.tokenizer.decode(prompt)
            for prompt in prompts
        )
    echoes_logprobs = bool(body.echo) and n_top is not None
    scored = [prompt_logprobs, n_top if echoes_logprobs else None]
    k = max((number for number in scored if number is not None), default=None)
    params = params.replace(prompt_logprobs=k)
    return _job(
        body,
        ids,
        params,
        limits,
        echoed=echoed,
        prompt_logprobs=prompt_logprobs,
        echoes_logprobs=echoes_logprobs,
        drops_output=requested == 0,
        has_chat_logprobs=False,
    )


def completion_constraint(body: CompletionRequest) -> Constraint | None:
    """See `request_constraint`."""
    return constraint_to_try(constraint_fields(body))


def _is_one(prompt: Any) -> bool:
    return isinstance(prompt, str) or isinstance(prompt[0], int)


def _encoder(llm: LLM) -> Any:
    return lambda text: llm.tokenizer.encode(text, add_special_tokens=False)


def _job(
    body: Sampling,
    prompts: list[list[int]],
    params: SamplingParams,
    limits: ServeOptions,
    **more: Any,
) -> Job:
    n = body.n or 1
    check_choices(len(prompts) * n, limits)
    num_prompt_tokens = n * sum(map(len, prompts))
    params = with_few_logprobs(body, params, len(prompts) * n, num_prompt_tokens, limits)
    more |= stream_fields(body)
    more |= {"priority": body.priority or 0, "caches_prompt": body.cache_prompt is not False}
    more["includes_stop"] = bool(body.include_stop_str_in_output)
    if params.is_greedy:
        return Job(tuple(prompts), params, n_copies=n, **more)
    return Job(tuple(prompts), params.replace(n=n), **more)


def _check_context(prompts: Sequence[Sequence[int]], llm: LLM) -> None:
    for ids in prompts:
        if len(ids) >= llm.max_context:
            try:
                check_context_capacity(len(ids), llm.max_context, llm.session.model_context)
            except Exception as error:
                raise bad_request(str(error), code="context_length_exceeded") from error
