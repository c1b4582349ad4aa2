"""Requests of /v1/chat/completions, which those of the other chat APIs are translated to."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from specdec.serve.api.base import MAX_TOP_LOGPROBS, Length, Lenient, RequestModel, Sampling

MAX_MESSAGES, MAX_PARTS, MAX_TOOLS = 4096, 1024, 512
MAX_VARIABLES = 64

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]


class Part(Lenient):
    """Content part. Its type is checked later, so that the error can name it."""

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None


class CalledFunction(Lenient):
    name: Name
    arguments: str | dict[str, Any] | None = None


class MessageToolCall(Lenient):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Lenient):
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | Annotated[list[Part], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Function(Lenient):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Lenient):
    """Tool; kinds other than functions are skipped."""

    type: str
    function: Function | None = None


class NamedFunction(Lenient):
    name: Name


class NamedTool(Lenient):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Lenient):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(max_length=MAX_TOOLS)]


class AllowedToolChoice(Lenient):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class JsonSchema(Lenient):
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextFormat(Lenient):
    type: Literal["text"]


class ObjectFormat(Lenient):
    """Any JSON object, or one of llama.cpp's `schema`."""

    type: Literal["json_object"]
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class SchemaFormat(Lenient):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class ConversationFields(RequestModel):
    """Messages, and how the template renders them."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_VARIABLES)] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ChatRequest(Sampling, ConversationFields):
    max_completion_tokens: Length | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tool_choice: (
        Literal["none", "auto", "required", "any"] | NamedTool | AllowedToolChoice | None
    ) = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    thinking_budget_tokens: Annotated[int, Field(ge=-1)] | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1)] | None = None
    include_reasoning: bool | None = None
    reasoning_format: Literal["none", "auto", "deepseek", "deepseek-legacy"] | None = None

    @property
    def reasoning_budget(self) -> int | None:
        """Tokens that the reasoning may have, by llama.cpp's name or vLLM's; -1: no limit."""
        given = self.thinking_budget_tokens
        return self.thinking_token_budget if given is None else given
