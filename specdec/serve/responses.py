"""Response bodies in OpenAI's shape, which also define /openapi.json.

A field with a default is optional: it is sent if it was set, null included. Clients skip fields
that they do not know, so any model here may get more of them.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from starlette.responses import Response

Count = Annotated[int, Field(ge=0)]
State = Literal["starting", "ready", "restarting", "failing", "failed", "draining"]


class ResponseModel(BaseModel):
    """A JSON object of a response."""

    def to_json(self) -> bytes:
        """Return JSON in ASCII: a lone surrogate of a request can be sent back that way."""
        return to_json(self.model_dump(exclude_unset=True))


def to_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


class JsonResponse(Response):
    """A response of a model, or of another value that JSON can hold."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content.to_json() if isinstance(content, ResponseModel) else to_json(content)


# --- errors ------------------------------------------------------------------------------------


class ErrorDetail(ResponseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseModel):
    error: ErrorDetail


# --- the server --------------------------------------------------------------------------------


class Health(ResponseModel):
    """models: the state of each of several models. replicas: of each of several engines. errors:
    why engines are not started any more."""

    status: State
    models: dict[str, str] = {}
    replicas: list[str] = []
    errors: list[str] = []


class ModelStatus(ResponseModel):
    """llama.cpp's status of one of several models."""

    value: Literal["unloaded", "loading", "loaded"]
    failed: bool = False


class ModelCard(ResponseModel):
    """has_chat_template: known once the model has been loaded. replicas: engines that take
    requests, where there are several."""

    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    max_model_len: Count
    has_chat_template: bool = False
    replicas: Count = 1
    status: ModelStatus = ModelStatus(value="loaded")


class ModelList(ResponseModel):
    object: Literal["list"]
    data: list[ModelCard]


# --- completions -------------------------------------------------------------------------------


class PromptTokensDetails(ResponseModel):
    cached_tokens: Count


class CompletionTokensDetails(ResponseModel):
    """Accepted draft tokens are part of the completion; rejected ones are counted only here."""

    accepted_prediction_tokens: Count
    rejected_prediction_tokens: Count
    reasoning_tokens: Count


class Usage(ResponseModel):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Timings(ResponseModel):
    """llama.cpp's timings, and after them ours. prompt_n does not count the cached tokens."""

    cache_n: Count
    prompt_n: Count
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: Count
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: Count
    draft_n_accepted: Count
    passes: Count
    tokens_per_pass: float
    bytes_streamed: Count
    stall_ms: float


class Draft(ResponseModel):
    """The part of an event's text that was drafted."""

    n_tokens: Count
    n_accepted: Count
    n_accepted_characters: Count


class PromptProgress(ResponseModel):
    """llama.cpp's progress of a prompt: tokens in total, cached, and computed with the cached
    ones."""

    total: Count
    cache: Count
    processed: Count
    time_ms: float


class Envelope(ResponseModel):
    """The fields that every completion and every event of a stream begins with."""

    id: str
    object: str
    created: Count
    model: str
    system_fingerprint: str


class TokenLogprob(ResponseModel):
    token: str
    logprob: float
    bytes: list[Count]


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(ResponseModel):
    content: list[ChatTokenLogprob]
    refusal: None


class CompletionLogprobs(ResponseModel):
    """Log-probabilities of tokens; an echoed prompt's first token has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[Count]


class PromptLogprob(ResponseModel):
    """vLLM's entry of a token of the prompt. rank: 1 is the likeliest."""

    logprob: float
    rank: Annotated[int, Field(ge=1)]
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Entries by token id of each token of the prompt, of which the first has none."""


class FunctionCall(ResponseModel):
    name: str
    arguments: str
    """JSON, as OpenAI's clients expect it."""


class ToolCall(ResponseModel):
    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionCallDelta(ResponseModel):
    name: str = ""
    arguments: str


class ToolCallDelta(ResponseModel):
    """The first one of a call has its id and name; the arguments of all are to be joined."""

    index: Count
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCallDelta


class ChatMessage(ResponseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = []


class ChatChoice(ResponseModel):
    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    finish_note: str = ""


class ChatDelta(ResponseModel):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = []


class ChatChunkChoice(ResponseModel):
    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    finish_note: str = ""


class CompletionChunkChoice(ResponseModel):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    finish_note: str = ""


class CompletionChoice(CompletionChunkChoice):
    finish_reason: Literal["stop", "length"]
    prompt_logprobs: PromptLogprobs = []


class ChatCompletion(Envelope):
    object: Literal["chat.completion"]
    choices: Annotated[list[ChatChoice], Field(min_length=1)]
    usage: Usage
    timings: Timings
    prompt_logprobs: PromptLogprobs = []


class Completion(Envelope):
    object: Literal["text_completion"]
    choices: Annotated[list[CompletionChoice], Field(min_length=1)]
    usage: Usage
    timings: Timings


class Chunk(Envelope):
    """Event of a stream; it has metrics if the request asked for them."""

    choices: list[Any]
    draft: Draft | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    prompt_progress: PromptProgress | None = None


class ChatCompletionChunk(Chunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class CompletionChunk(Chunk):
    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
