"""Requests of /v1/messages (Anthropic's API), and their translation to chats."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from specdec.serve.api.base import MAX_STOPS, Length, Lenient, RequestModel, StopText
from specdec.serve.api.chat import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, ChatRequest
from specdec.serve.api.reading import validated
from specdec.serve.errors import bad_request

_SKIPPED_BLOCKS = ("redacted_thinking",)


class Source(Lenient):
    type: str
    data: str | None = None


class ResultBlock(Lenient):
    """Block in the result of a tool."""

    type: str
    text: str | None = None


class Block(Lenient):
    """Content block. Its type is checked later, so that the error can name it."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None
    source: Source | None = None


Blocks = Annotated[list[Block], Field(fail_fast=True, max_length=MAX_PARTS)]


class AnthropicMessage(Lenient):
    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class AnthropicTool(Lenient):
    """Tool; one with a type of its own runs at Anthropic, and is skipped."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class AnthropicToolChoice(Lenient):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Lenient):
    """Whether the model thinks, and for how many tokens."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputFormat(Lenient):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Lenient):
    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(RequestModel):
    """Request of /v1/messages/count_tokens."""

    messages: Annotated[
        list[AnthropicMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
    ]
    model: str | None = None
    system: str | Blocks | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None


class MessagesRequest(CountRequest):
    max_tokens: Length | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None


def messages_chat(body: CountRequest) -> ChatRequest:
    """Return the chat of a request. Raises ApiError."""
    choice, config = body.tool_choice, body.output_config
    same = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k")
    form = body.output_format or (None if config is None else config.format)
    fields = {
        **body.extensions,
        **{name: getattr(body, name, None) for name in same},
        "messages": _messages(body),
        "stop": getattr(body, "stop_sequences", None),
        "tools": [_tool(tool) for tool in body.tools or ()] or None,
        "tool_choice": None if choice is None else _tool_choice(choice),
        "enable_thinking": None if body.thinking is None else body.thinking.type != "disabled",
        "reasoning_effort": None if config is None else config.effort,
    }
    if body.thinking is not None and (body.thinking.budget_tokens or 0) > 0:
        fields["thinking_budget_tokens"] = body.thinking.budget_tokens
    if choice is not None and choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    if form is not None:
        fields["response_format"] = {"type": form.type, form.type: {"schema": form.schema_}}
    return validated(fields, ChatRequest)


def _messages(body: CountRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system:
        system = body.system if isinstance(body.system, str) else _text_parts(body.system, "system")
        messages.append({"role": "system", "content": system})
    for i, message in enumerate(body.messages):
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant(message.content, f"messages.{i}.content"))
        else:
            messages += _user(message, f"messages.{i}.content")
    return messages


def _text_parts(blocks: list[Block], param: str) -> list[dict[str, Any]]:
    return [_text(block, f"{param}.{i}") for i, block in enumerate(blocks)]


def _text(block: Block, param: str) -> dict[str, Any]:
    text = block.text
    if block.type == "document" and block.source is not None and block.source.type == "text":
        text = block.source.data
    elif block.type != "text":
        raise bad_request(
            f"a block of type {block.type[:40]} is not supported: this server takes text only, and "
            "fetches nothing",
            param,
        )
    if text is None:
        raise bad_request(f"{param} has no text", f"{param}.text")
    return {"type": "text", "text": text}


def _assistant(blocks: list[Block], param: str) -> dict[str, Any]:
    parts, calls, thoughts = [], [], []
    for i, block in enumerate(blocks):
        if block.type == "tool_use":
            if block.name is None:
                raise bad_request(f"{param}.{i} has no name", f"{param}.{i}.name")
            function = {"name": block.name, "arguments": block.input or {}}
            calls.append({"id": block.id, "function": function})
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type not in _SKIPPED_BLOCKS:
            parts.append(_text(block, f"{param}.{i}"))
    content = parts or (None if calls else "")
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": calls or None,
        "reasoning_content": "\n".join(thoughts) or None,
    }


def _user(message: AnthropicMessage, param: str) -> list[dict[str, Any]]:
    """Return the results of tools, each a message, and then the parts beside them."""
    results, parts = [], []
    for i, block in enumerate(message.content):
        assert isinstance(block, Block)
        if block.type == "tool_result":
            results.append(_result(block, f"{param}.{i}"))
        else:
            parts.append(_text(block, f"{param}.{i}"))
    if parts or not results:
        results.append({"role": message.role, "content": parts})
    return results


def _result(block: Block, param: str) -> dict[str, Any]:
    content = block.content or ""
    if not isinstance(content, str):
        blocks = [Block(type=part.type, text=part.text) for part in content]
        parts = _text_parts(blocks, f"{param}.content")
        content = "\n".join(part["text"] for part in parts)
    if block.is_error:
        content = f"Error: {content}"
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    if tool.input_schema is None and tool.type not in (None, "custom"):
        return {"type": tool.type}
    function = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _tool_choice(choice: AnthropicToolChoice) -> Any:
    if choice.type == "tool":
        if choice.name is None:
            raise bad_request("tool_choice has no name", "tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type
