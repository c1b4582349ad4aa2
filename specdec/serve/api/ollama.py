"""Requests of Ollama's API, and their translation to chats and completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from specdec.serve.api.base import Lenient, RequestModel
from specdec.serve.api.chat import MAX_MESSAGES, MAX_TOOLS, ChatRequest, Tool
from specdec.serve.api.completions import CompletionRequest
from specdec.serve.api.reading import validated
from specdec.serve.errors import bad_request

_OPTIONS = {
    "num_predict": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repeat_penalty",
    "repeat_last_n": "repeat_last_n",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "mirostat": "mirostat",
}
"""Ollama's options and their names here; the others are about loading, and ignored."""


class OllamaFunction(Lenient):
    name: str
    arguments: dict[str, Any] | None = None


class OllamaCall(Lenient):
    id: str | None = None
    function: OllamaFunction


class OllamaMessage(Lenient):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaRequest(RequestModel):
    """Fields of both routes. Answers are streams, unless the request says otherwise."""

    model: str | None = None
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: Any = None


class OllamaChatRequest(OllamaRequest):
    messages: Annotated[list[OllamaMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)] = []
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None


class OllamaGenerateRequest(OllamaRequest):
    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    images: list[Any] | None = None
    template: str | None = None
    context: list[int] | None = None


class ShowRequest(RequestModel):
    model: str | None = None
    name: str | None = None  # the older name


def ollama_chat(body: OllamaChatRequest) -> ChatRequest:
    """Return the chat of a request. Raises ApiError."""
    messages = [_message(message, i) for i, message in enumerate(body.messages)]
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    return validated({**_fields(body), "messages": messages, "tools": tools or None}, ChatRequest)


def generate_chat(body: OllamaGenerateRequest) -> ChatRequest:
    """Return the chat of a request for a text, which is the user's message. Raises ApiError."""
    _check(body)
    system = [{"role": "system", "content": body.system}] if body.system else []
    messages = [*system, {"role": "user", "content": body.prompt}]
    return validated({**_fields(body), "messages": messages}, ChatRequest)


def generate_completion(body: OllamaGenerateRequest) -> CompletionRequest:
    """Return the completion of a request for a raw text. Raises ApiError."""
    _check(body)
    fields = {"max_tokens": -1, **_fields(body), "prompt": body.prompt}
    return validated(
        {name: value for name, value in fields.items() if name in CompletionRequest.model_fields},
        CompletionRequest,
    )


def _check(body: OllamaGenerateRequest) -> None:
    for name in ("images", "template", "context"):
        if getattr(body, name):
            raise bad_request(f"{name} is not supported: this server takes text only", name)


def _fields(body: OllamaRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {"model": body.model, "stream": body.stream is not False}
    for name, value in (body.options or {}).items():
        if name in _OPTIONS and value is not None:
            fields[_OPTIONS[name]] = value
    if "return_progress" in body.extensions:
        fields["return_progress"] = body.extensions["return_progress"]
    if isinstance(body.think, bool):
        fields["enable_thinking"] = body.think
    elif body.think is not None:
        fields |= {"enable_thinking": True, "reasoning_effort": body.think}
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif isinstance(body.format, dict):
        fields["json_schema"] = body.format
    return fields


def _message(message: OllamaMessage, index: int) -> dict[str, Any]:
    if message.images:
        param = f"messages.{index}.images"
        raise bad_request(f"{param} are not supported: this server takes text only", param)
    calls = [call.model_dump(exclude_none=True) for call in message.tool_calls or ()]
    return {
        "role": message.role,
        "content": message.content if message.content or not calls else None,
        "reasoning_content": message.thinking,
        "tool_calls": calls or None,
        "name": message.tool_name,
        "tool_call_id": message.tool_call_id,
    }
