"""From the messages and tools of a chat to what its template takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from specdec.serve.api.chat import (
    AllowedToolChoice,
    ChatRequest,
    ConversationFields,
    Message,
    MessageToolCall,
    NamedTool,
    Part,
    Tool,
)
from specdec.serve.errors import bad_request
from specdec.text import openai
from specdec.text.chat_format import TemplateOptions

_ROLES = {"developer": "system", "function": "tool", "model": "assistant"}
_KNOWN_ROLES = ("system", "user", "assistant", "tool")
_RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message")
_TEXT_PARTS = ("text", "input_text", "output_text")


def template_messages(body: ConversationFields) -> list[dict[str, Any]]:
    """Return the messages as templates expect them. Raises ApiError."""
    return [_message(message, i) for i, message in enumerate(body.messages)]


def template_options(body: ConversationFields) -> TemplateOptions:
    """Return how the template renders the messages. Raises ApiError."""
    given = body.chat_template_kwargs or {}
    for name in _RESERVED:
        if name in given:
            raise bad_request(
                f"chat_template_kwargs.{name}: send {name} itself", f"chat_template_kwargs.{name}"
            )
    variables: dict[str, Any] = {}
    thinks = _thinks(body)
    if thinks is not None:
        variables = {"enable_thinking": thinks, "thinking": thinks}  # Qwen's name, and DeepSeek's
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    if body.documents is not None:
        variables["documents"] = body.documents
    continues_last = _continues_last(body)
    return TemplateOptions(
        {**variables, **given},
        add_generation_prompt=body.add_generation_prompt is not False,
        continues_last=continues_last,
    )


def _thinks(body: ConversationFields) -> bool | None:
    """Return whether the model shall think; None leaves it to the template."""
    if body.enable_thinking is not None:
        return body.enable_thinking
    budget = getattr(body, "reasoning_budget", None)
    return False if budget == 0 or body.reasoning_effort == "none" else None


def _continues_last(body: ConversationFields) -> bool:
    """Return whether the answer continues the last message: the assistant's, unless told not to."""
    last, asked = body.messages[-1], body.continue_final_message
    is_open = _role(last) == "assistant" and last.content is not None and not last.tool_calls
    if asked and not is_open:
        raise bad_request(
            "continue_final_message needs an assistant's text as the last message",
            "continue_final_message",
        )
    if asked and body.add_generation_prompt:
        raise bad_request(
            "continue_final_message and add_generation_prompt contradict each other",
            "continue_final_message",
        )
    return is_open and asked is not False and not body.add_generation_prompt


def _role(message: Message) -> str:
    """Return a role that templates know; any other speaks as the user."""
    role = _ROLES.get(message.role, message.role)
    return role if role in _KNOWN_ROLES else "user"


def _message(message: Message, index: int) -> dict[str, Any]:
    """Return a message as templates expect it: content as one string, arguments as objects."""
    param, role = f"messages[{index}]", _role(message)
    if message.content is None and role in ("system", "user"):
        raise bad_request(f"{param} has no content, which only an assistant's may lack", param)
    if message.content is None and role == "assistant" and not message.tool_calls:
        raise bad_request(f"{param} has neither content nor tool_calls: send one of them", param)
    reasoning = [message.reasoning_content or message.reasoning or ""]
    content: list[str] | str | None = None
    if isinstance(message.content, str):
        content = message.content
    elif message.content is not None:
        content = []
        for i, part in enumerate(message.content):
            if part.type == "thinking":
                reasoning.append(part.thinking or "")
            else:
                content.append(_text(part, f"{param}.content[{i}]"))
    shown = openai.template_message(
        role,
        content,
        name=message.name,
        tool_call_id=message.tool_call_id,
        tool_calls=[_call(call, param) for call in message.tool_calls or ()] or None,
        reasoning_content="".join(reasoning) or None,
    )
    return shown if message.content is not None else {**shown, "content": None}


def _text(part: Part, param: str) -> str:
    text = part.text if part.type in _TEXT_PARTS else part.refusal
    if part.type not in (*_TEXT_PARTS, "refusal"):
        raise bad_request(
            f"a content part of type {part.type[:40]} is not supported: this server takes text "
            "only, and fetches nothing",
            param,
        )
    if text is None:
        raise bad_request(f"{param} has no text", f"{param}.text")
    return text


def _call(call: MessageToolCall, param: str) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": _arguments(call, param)}
    return {
        **({} if call.id is None else {"id": call.id}),
        "type": "function",
        "function": function,
    }


def _arguments(call: MessageToolCall, param: str) -> Any:
    given = call.function.arguments or {}
    if isinstance(given, dict):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError) as error:
        raise bad_request(
            "the arguments of a tool call are no JSON", f"{param}.tool_calls"
        ) from error


# --- tools -------------------------------------------------------------------------------------


def offered_tools(body: ChatRequest) -> list[Tool]:
    """Return the tools that are shown to the model: functions, unless the choice excludes them.

    Raises ApiError.
    """
    tools = functions(body.tools)
    choice = body.tool_choice
    if not tools and choice not in (None, "none", "auto"):
        raise bad_request("tool_choice needs tools, of type function", "tool_choice")
    if choice == "none":
        return []
    if isinstance(choice, NamedTool):
        return _named(tools, [choice])
    if isinstance(choice, AllowedToolChoice):
        return _named(tools, choice.allowed_tools.tools)
    return tools


def functions(tools: Sequence[Tool] | None) -> list[Tool]:
    """Return the tools that are functions; others run at OpenAI, and here nobody calls them."""
    for i, tool in enumerate(tools or ()):
        if tool.type == "function" and tool.function is None:
            raise bad_request(f"tools.{i}.function is missing", f"tools.{i}.function")
    return [tool for tool in tools or () if tool.type == "function"]


def is_call_forced(body: ChatRequest) -> bool:
    """Return whether the answer has to be a call of an offered tool."""
    choice = body.tool_choice
    if isinstance(choice, AllowedToolChoice):
        return choice.allowed_tools.mode == "required"
    return choice not in (None, "auto", "none")


def _named(tools: Sequence[Tool], choices: Sequence[NamedTool]) -> list[Tool]:
    by_name = {tool.function.name: tool for tool in tools if tool.function is not None}
    for choice in choices:
        if choice.function.name not in by_name:
            raise bad_request(
                f"tool_choice names {choice.function.name}, which is none of the tools",
                "tool_choice",
            )
    return [by_name[choice.function.name] for choice in choices]
