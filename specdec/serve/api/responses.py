"""Requests of /v1/responses, and their translation to chats. Nothing is stored between them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from specdec.serve.api.base import MAX_TOP_LOGPROBS, Length, Lenient, RequestModel
from specdec.serve.api.chat import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, ChatRequest, Part
from specdec.serve.api.reading import validated
from specdec.serve.errors import bad_request

_LOGPROBS = "message.output_text.logprobs"
_SKIPPED_ITEMS = ("item_reference", "compaction")
_CALLS = ("function_call", "custom_tool_call")
_RESULTS = ("function_call_output", "custom_tool_call_output")
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]
"""Metadata within OpenAI's limits."""
Parts = Annotated[list[Part], Field(fail_fast=True, max_length=MAX_PARTS)]


class InputItem(Lenient):
    """Message, call, result of a call, or reasoning."""

    type: str | None = None
    role: str | None = None
    content: str | Parts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | Parts | None = None
    summary: Parts | None = None


class ResponsesTool(Lenient):
    """Tool; kinds other than functions are skipped."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesToolChoice(Lenient):
    type: str
    name: str | None = None
    mode: str | None = None
    tools: list[dict[str, Any]] | None = None


class ResponsesFormat(Lenient):
    type: str
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Lenient):
    format: ResponsesFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(Lenient):
    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(RequestModel):
    input: str | Annotated[list[InputItem], Field(fail_fast=True, max_length=MAX_MESSAGES)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Length | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stream: bool | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    metadata: Metadata | None = None
    truncation: str | None = None
    store: bool | None = None
    # Need what an earlier response stored, or a response that outlives its request.
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None


_REPEATED = (
    "instructions",
    "max_output_tokens",
    "metadata",
    "parallel_tool_calls",
    "reasoning",
    "text",
    "tool_choice",
    "tools",
)


def repeated_fields(body: ResponsesRequest) -> ResponsesRequest:
    """Return the part of a request that its response repeats: it stays in memory until then."""
    fields = {name: getattr(body, name) for name in _REPEATED}
    return ResponsesRequest.model_construct(None, **fields)


def responses_chat(body: ResponsesRequest) -> ChatRequest:
    """Return the chat of a request. Raises ApiError."""
    for name in ("previous_response_id", "conversation", "prompt", "background"):
        if getattr(body, name):
            raise bad_request(f"{name} is not supported: responses are not stored here", name)
    wants_logprobs = _LOGPROBS in (body.include or ())
    fields = {
        **body.extensions,
        "messages": _messages(body),
        "add_generation_prompt": True,
        "model": body.model,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "logprobs": wants_logprobs or None,
        "top_logprobs": body.top_logprobs if wants_logprobs else None,
        "stream": body.stream,
        "tools": [_tool(tool, i) for i, tool in enumerate(body.tools or ())] or None,
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning.effort if body.reasoning is not None else None,
        "response_format": _format(body.text),
    }
    return validated(fields, ChatRequest)


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    reasoning: list[str] = []
    for i, item in enumerate(body.input):
        kind = item.type or "message"
        if kind == "reasoning":
            reasoning.append(_reasoning(item))
        elif kind == "message":
            message = _message(item, i)
            if message["role"] == "assistant" and reasoning:
                message["reasoning_content"] = "\n".join(reasoning)
            messages.append(message)
            reasoning = []
        elif kind in _CALLS:
            _add_call(messages, item, i, "\n".join(reasoning))
            reasoning = []
        elif kind in _RESULTS:
            messages.append(_result(item, i))
        elif kind not in _SKIPPED_ITEMS:
            raise bad_request(f"an item of type {kind[:40]} is not supported", f"input.{i}.type")
    return messages


def _message(item: InputItem, index: int) -> dict[str, Any]:
    if item.role is None:
        raise bad_request(f"input.{index} has no role", f"input.{index}.role")
    return {"role": item.role, "content": _content(item.content)}


def _reasoning(item: InputItem) -> str:
    parts = item.content if isinstance(item.content, list) and item.content else item.summary
    return "\n".join(part.text or "" for part in parts or ())


def _add_call(messages: list[dict[str, Any]], item: InputItem, index: int, reasoning: str) -> None:
    """Add a call to the assistant's message before it, or to a new one."""
    if item.name is None:
        raise bad_request(f"input.{index} has no name", f"input.{index}.name")
    arguments = item.arguments if item.input is None else {"input": item.input}
    call = {"id": item.call_id, "function": {"name": item.name, "arguments": arguments}}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    if reasoning:
        messages[-1]["reasoning_content"] = reasoning
    messages[-1].setdefault("tool_calls", []).append(call)


def _result(item: InputItem, index: int) -> dict[str, Any]:
    if item.output is None:
        raise bad_request(f"input.{index} has no output", f"input.{index}.output")
    return {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}


def _content(content: str | list[Part] | None) -> str | list[dict[str, Any]] | None:
    if isinstance(content, list):
        return [part.model_dump(exclude_none=True) for part in content]
    return content


def _tool(tool: ResponsesTool, index: int) -> dict[str, Any]:
    if tool.type != "function":
        return {"type": tool.type}
    if tool.name is None:
        raise bad_request(f"tools.{index}.name is missing", f"tools.{index}.name")
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _tool_choice(choice: str | ResponsesToolChoice | None) -> Any:
    if not isinstance(choice, ResponsesToolChoice):
        return choice
    if choice.type == "function" and choice.name is not None:
        return {"type": "function", "function": {"name": choice.name}}
    if choice.type == "allowed_tools":
        names = [tool.get("name") for tool in choice.tools or ()]
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": choice.type, choice.type: {"mode": choice.mode or "auto", "tools": tools}}
    raise bad_request(
        f"tool_choice of type {choice.type[:40]} is not supported: send function", "tool_choice"
    )


def _format(text: TextOptions | None) -> dict[str, Any] | None:
    form = None if text is None else text.format
    if form is None:
        return None
    if form.type != "json_schema":
        return {"type": form.type}
    schema = {"name": form.name, "schema": form.schema_, "strict": form.strict}
    return {"type": form.type, form.type: schema}
