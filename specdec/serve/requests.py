"""Request bodies: OpenAI's fields, and a few more that its clients send as extra_body.

A field that is unknown, or asks for something unsupported, is refused and never ignored. Limits
of the server itself are checked when a request is made into a job.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from specdec.serve.errors import ApiError, bad_request

MAX_STOPS, MAX_STOP_CHARACTERS, MAX_BIASES, MAX_TOOLS = 16, 256, 1024, 128
MAX_TOP_LOGPROBS = 20
MAX_MESSAGES, MAX_PARTS = 4096, 1024


def _no_number(value: Any) -> Any:
    """Turn numbers into strings, or 0 would pass for False, to which it is equal."""
    return value if isinstance(value, bool) else str(value)


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
No = Annotated[Literal[False], BeforeValidator(_no_number)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]
"""Metadata within OpenAI's limits."""
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_draft: bool | None = None  # ours: how much of each pass's text was drafted
    include_obfuscation: bool | None = None  # padding against eavesdroppers: there is none here


class Sampling(Strict):
    """Fields that chat and plain completions share."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    seed: int | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, Field(pattern=r"^[0-9]{1,9}$")],
                Annotated[float, Field(ge=-100, le=100)],
            ],
            Field(max_length=MAX_BIASES),
        ]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Not OpenAI's; vLLM and llama.cpp have them.
    top_k: Annotated[int, Field(ge=-1)] | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-4, le=1e4)] | None = None
    ignore_eos: bool | None = None
    timings_per_token: bool | None = None  # llama.cpp's: every event of a stream has `timings`
    # Accepted without effect.
    user: str | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    store: No | None = None  # nothing is stored


class TextPart(Strict):
    type: Literal["text"]
    text: str


class OtherPart(BaseModel):
    """Content part that is no text; parsed so that the error can name its type."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: Literal["image_url", "input_audio", "file", "video_url", "audio_url", "refusal"]


class CalledFunction(Strict):
    name: Name
    arguments: str


class MessageToolCall(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        str
        | Annotated[list[TextPart | OtherPart], Field(fail_fast=True, max_length=MAX_PARTS)]
        | None
    ) = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    # Fields of OpenAI's answers, which clients send back.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class Function(Strict):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: Name


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Strict):
    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class PlainFormat(Strict):
    type: Literal["text", "json_object"]


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")]


class ChatRequest(Sampling):
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None


TokenId = Annotated[int, Field(ge=0)]


class CompletionRequest(Sampling):
    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, min_length=1)]
        | Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
        | Annotated[
            list[Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]],
            Field(fail_fast=True, min_length=1),
        ]
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: None = None
    best_of: Annotated[int, Field(ge=1)] | None = None


# --- parsing of a body -------------------------------------------------------------------------

_R = TypeVar("_R", bound=BaseModel)
_DISCRIMINATED = "response_format"  # behind which pydantic puts the type, as if it were a field


def read_request(body: bytes | bytearray, form: type[_R]) -> _R:
    """Return a validated request. Its ApiError repeats names of fields only, never values."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise bad_request("the body is no JSON") from error
    try:
        return form.model_validate(value)
    except ValidationError as error:
        raise _api_error(error) from error


def _api_error(error: ValidationError) -> ApiError:
    """Return the deepest error: of several types that a value may have, the client meant the one
    that it matches furthest."""
    deepest = max(error.errors(include_url=False, include_input=False), key=lambda e: len(e["loc"]))
    param = ".".join(_place(deepest["loc"], deepest["type"] == "extra_forbidden"))[:200]
    if not param:
        return bad_request("send a JSON object")
    if deepest["type"] == "union_tag_invalid":  # its own message repeats what was written
        return bad_request(f"{param}.type must be one of {deepest['ctx']['expected_tags']}", param)
    return bad_request(f"{param}: {deepest['msg']}", param)


def _place(location: Sequence[str | int], is_unknown: bool) -> list[str]:
    """Leave out pydantic's names of union members. is_unknown: the last part is a field that does
    not exist."""
    named = location[:-1] if is_unknown else location
    known = [
        str(part)
        for before, part in zip(("", *named), named, strict=False)
        if isinstance(part, int) or (part in _FIELDS and before != _DISCRIMINATED)
    ]
    return [*known, str(location[-1])] if is_unknown else known


def _fields(form: type[BaseModel]) -> set[str]:
    own = {field.alias or name for name, field in form.model_fields.items()}
    return own.union(*(_fields(subclass) for subclass in form.__subclasses__()))


_FIELDS = _fields(Strict) | _fields(OtherPart)
