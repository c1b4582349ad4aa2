"""Conversion of requests to what the LLM takes, within the model's limits and the server's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.api import LLM
from specdec.grammar.constraint import Constraint, schema_text
from specdec.sampling.params import SEED_LIMIT, SamplingParams
from specdec.serve.errors import bad_request
from specdec.serve.options import ServeOptions
from specdec.serve.requests import (
    ChatRequest,
    CompletionRequest,
    Message,
    NamedTool,
    OtherPart,
    SchemaFormat,
    Tool,
)
from specdec.serve.requests import Sampling as SamplingFields
from specdec.text import openai
from specdec.text.prompts import check_context_capacity, encode_prompt

_DEFAULT_TEMPERATURE = 1.0  # OpenAI's
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, of /v1/completions
_ANY_SEED = -1  # llama.cpp's value for a new one each time
_SAME_NAME = (
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
)


@dataclass(frozen=True)
class Job:
    """A request as the LLM takes it.

    n_copies: copies of each sequence in the answer, for greedy decoding gives n equal ones.
    tools: names that the answer may call; max_calls: None is any number.
    """

    prompts: tuple[list[int], ...]
    params: SamplingParams
    priority: int = 0
    n_copies: int = 1
    tools: tuple[str, ...] = ()
    max_calls: int | None = None
    echoed: tuple[str, ...] = ()
    """Texts of the prompts, if the answer repeats them."""
    streams_output: bool = False
    tells_usage: bool = False
    """Whether the last event of a stream has the usage."""
    tells_draft: bool = False
    """Whether events say how much of their text was drafted."""
    tells_timings: bool = False
    """Whether events have the timings so far."""

    @property
    def n_choices(self) -> int:
        return len(self.prompts) * self.n_per_prompt

    @property
    def n_per_prompt(self) -> int:
        return self.params.n * self.n_copies


def chat_job(body: ChatRequest, llm: LLM, limits: ServeOptions) -> Job:
    """Return the job of a chat request, whose `constraint_to_try` must have been tried before.

    Raises ApiError, SpecdecError.
    """
    tools = _offered(body)
    max_tokens = body.max_completion_tokens or body.max_tokens
    params = llm.session.chat_params(_params(body, max_tokens, limits))
    try:
        params = params.replace(logprobs=openai.logprobs(body.logprobs, body.top_logprobs))
    except ValueError as error:
        raise bad_request(str(error), "top_logprobs") from error
    params = params.replace(**_constraint(body, tools))
    messages = [_plain(message, i) for i, message in enumerate(body.messages)]
    ids = llm.tokenizer.encode_chat(
        messages, [tool.model_dump(exclude_none=True) for tool in tools]
    )
    _check_context([ids], llm)
    return _job(
        body,
        [list(ids)],
        params,
        limits,
        tools=tuple(tool.function.name for tool in tools),
        max_calls=1 if body.parallel_tool_calls is False else None,
    )


def constraint_to_try(body: ChatRequest) -> Constraint | None:
    """Return the client's schema, which must be tried in another process first; None if there is
    none. Raises ApiError, ConfigError."""
    schema = _constraint(body, _offered(body)).get("json_schema")
    return None if schema is None else Constraint("json_schema", schema)


def completion_job(body: CompletionRequest, llm: LLM, limits: ServeOptions) -> Job:
    """Return the job of a completion request. Raises ApiError, SpecdecError."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_request("best_of is not supported, unless it equals n: leave it out", "best_of")
    default = min(_DEFAULT_COMPLETION_TOKENS, limits.max_output_tokens)
    params = _params(body, body.max_tokens or default, limits)
    params = params.replace(logprobs=openai.completion_logprobs(body.logprobs))
    prompts: Sequence[Any] = [body.prompt] if _is_one(body.prompt) else body.prompt
    _check_choices(len(prompts) * (body.n or 1), limits)
    ids = [encode_prompt(prompt, llm.tokenizer) for prompt in prompts]
    _check_context(ids, llm)
    echoed: tuple[str, ...] = ()
    if body.echo:
        if body.logprobs is not None:
            raise bad_request("echo does not go with logprobs: prompts have none here", "echo")
        echoed = tuple(
            prompt if isinstance(prompt, str) else llm.tokenizer.decode(prompt)
            for prompt in prompts
        )
    return _job(body, ids, params, limits, echoed=echoed)


def _is_one(prompt: Any) -> bool:
    return isinstance(prompt, str) or isinstance(prompt[0], int)


def _job(
    body: SamplingFields,
    prompts: list[list[int]],
    params: SamplingParams,
    limits: ServeOptions,
    **more: Any,
) -> Job:
    n = body.n or 1
    _check_choices(len(prompts) * n, limits)
    params = _with_few_logprobs(body, params, len(prompts) * n, limits)
    stream_options = body.stream_options
    more["streams_output"] = bool(body.stream)
    more["tells_usage"] = stream_options is not None and bool(stream_options.include_usage)
    more["tells_draft"] = stream_options is not None and bool(stream_options.include_draft)
    more["tells_timings"] = bool(body.timings_per_token)
    if params.is_greedy:
        return Job(tuple(prompts), params, body.priority, n_copies=n, **more)
    return Job(tuple(prompts), params.replace(n=n), body.priority, **more)


def _params(
    body: SamplingFields,
    max_tokens: int | None,
    limits: ServeOptions,
) -> SamplingParams:
    if max_tokens is not None and max_tokens > limits.max_output_tokens:
        name = "max_tokens" if max_tokens == body.max_tokens else "max_completion_tokens"
        raise bad_request(
            f"{name} is {max_tokens}, this server gives at most {limits.max_output_tokens}", name
        )
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream: true", "stream_options")
    values = {name: getattr(body, name) for name in _SAME_NAME if getattr(body, name) is not None}
    temperature = _DEFAULT_TEMPERATURE if body.temperature is None else body.temperature
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return SamplingParams(
        **values,
        temperature=temperature,
        top_k=max(body.top_k or 0, 0),  # -1 is vLLM's value for none
        max_tokens=limits.max_output_tokens if max_tokens is None else max_tokens,
        stop=tuple(stops),
        seed=None if body.seed in (None, _ANY_SEED) else body.seed % SEED_LIMIT,
        logit_bias=tuple((int(key), value) for key, value in (body.logit_bias or {}).items()),
    )


def _plain(message: Message, index: int) -> dict[str, Any]:
    """Return a message as templates expect it: content as one string, arguments as objects."""
    param = f"messages[{index}]"
    calls = [
        {
            **({} if call.id is None else {"id": call.id}),
            "type": "function",
            "function": {
                "name": call.function.name,
                "arguments": _arguments(call.function.arguments, param),
            },
        }
        for call in message.tool_calls or ()
    ]
    return openai.template_message(
        message.role,
        _content(message, param),
        name=message.name,
        tool_call_id=message.tool_call_id,
        tool_calls=calls or None,
    )


def _content(message: Message, param: str) -> str | list[str] | None:
    if message.content is None and message.role != "assistant":
        raise bad_request(f"{param} has no content, which only an assistant's may lack", param)
    if message.content is None or isinstance(message.content, str):
        return message.content
    strings = []
    for part in message.content:
        if isinstance(part, OtherPart):
            raise bad_request(
                f"a content part of type {part.type} is not supported: this server takes text "
                "only, and fetches nothing",
                f"{param}.content",
            )
        strings.append(part.text)
    return strings


def _arguments(text: str, param: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise bad_request(
            "the arguments of a tool call are no JSON", f"{param}.tool_calls"
        ) from error


# --- limits ------------------------------------------------------------------------------------


def _check_context(prompts: Sequence[Sequence[int]], llm: LLM) -> None:
    for ids in prompts:
        if len(ids) >= llm.max_context:
            try:
                check_context_capacity(len(ids), llm.max_context, llm.session.model_context)
            except Exception as error:
                raise bad_request(str(error), code="context_length_exceeded") from error


def _check_choices(n_choices: int, limits: ServeOptions) -> None:
    if n_choices > limits.max_choices:
        raise bad_request(
            f"the request asks for more than {limits.max_choices} sequences, the most that this "
            "server gives: lower n, or send several requests",
            "n",
        )


def _with_few_logprobs(
    body: SamplingFields, params: SamplingParams, num_sequences: int, limits: ServeOptions
) -> SamplingParams:
    """Limit log-probabilities, each of which takes half a kilobyte until the answer is sent.

    A sequence whose length the request leaves open ends where there would be too many.
    """
    if not params.logprobs:
        return params
    per_token = num_sequences * (1 + int(params.logprobs))
    max_tokens = max(1, limits.max_logprobs // per_token)
    if params.max_tokens <= max_tokens:
        return params
    if _is_length_open(body):
        return params.replace(max_tokens=max_tokens)
    raise bad_request(
        f"the request asks for {per_token * params.max_tokens} log-probabilities, this server "
        f"gives at most {limits.max_logprobs}: lower max_tokens, n or top_logprobs",
        "logprobs",
    )


def _is_length_open(body: SamplingFields) -> bool:
    is_chat_open = not isinstance(body, ChatRequest) or body.max_completion_tokens is None
    return body.max_tokens is None and is_chat_open


# --- tools and constraints ---------------------------------------------------------------------


def _offered(body: ChatRequest) -> list[Tool]:
    """Return the tools that are shown to the model."""
    tools, choice = body.tools or [], body.tool_choice
    if not tools and choice not in (None, "none", "auto"):
        raise bad_request("tool_choice needs tools", "tool_choice")
    if choice == "none":
        return []
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        if not tools:
            raise bad_request(
                f"tool_choice names {choice.function.name}, which is none of the tools",
                "tool_choice",
            )
    return tools


def _constraint(body: ChatRequest, tools: Sequence[Tool]) -> Mapping[str, Any]:
    """Return the constraint of response_format or tool_choice, as fields of SamplingParams."""
    form = body.response_format
    is_forced = bool(tools) and body.tool_choice not in (None, "auto")
    is_plain = form is None or form.type == "text"
    if is_forced and not is_plain:
        raise bad_request("response_format does not go with a forced tool call", "response_format")
    if is_forced:
        return {"json_schema": schema_text(_schema_of_calls(tools))}
    schema = form.json_schema.schema_ if isinstance(form, SchemaFormat) else None
    if schema is not None:
        return {"json_schema": schema_text(schema)}
    return openai.constraint(None if form is None else form.type, None)


def _schema_of_calls(tools: Sequence[Tool]) -> dict[str, Any]:
    """Return the schema of one call of a tool, in Llama 3's form, which `ToolCallParser` reads."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": _document(tool.function.parameters or {"type": "object"}, f"tool:{i}"),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i, tool in enumerate(tools)
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _document(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a subschema with an id of its own, so that `#/$defs/...` refers to its own parts."""
    return {"$id": name, **schema}
