"""Answers of /v1/responses."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Literal

from specdec.dialogue.deltas import (
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallBegin,
)
from specdec.serve.api.answer import Answer, Frames
from specdec.serve.api.responses import ResponsesRequest
from specdec.serve.events import (
    Choice,
    Failure,
    Finish,
    Step,
    ToolCallContent,
    Usage,
)
from specdec.serve.jobs import JobHead
from specdec.serve.responses import Count, PromptProgress, ResponseModel

Fields = dict[str, Any]


class ResponseObject(ResponseModel):
    """A response, complete or as far as it is."""

    id: str
    object: Literal["response"]
    created_at: Count
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: str
    usage: dict[str, Any] | None


class ResponsesEvent(ResponseModel):
    """Event of a stream; its other fields depend on its type."""

    type: str
    sequence_number: Count
    model_config = {"extra": "allow"}


class ResponsesAnswer(Answer):
    """Answer of one sequence, as items: reasoning, messages and calls."""

    def __init__(self, model: str, job: JobHead, request: Any = None) -> None:
        super().__init__(model, job, request)
        self._id, self._created = f"resp_{secrets.token_hex(24)}", int(time.time())
        self._request: ResponsesRequest = request
        self._number = -1
        self._items: list[Fields] = []
        self._is_open = False
        self._end: Finish | None = None
        self._logprobs: list[Any] = []

    def whole(self, choices: Sequence[Choice], usage: Usage) -> ResponseModel:
        choice = choices[0]
        logprobs = _of_tokens(choice.logprobs)
        items = [_item(kind, value) for kind, value in choice.content.parts]
        messages = [item for item in items if item["type"] == "message"]
        if messages and logprobs:
            messages[0]["content"][0]["logprobs"] = logprobs
        self._items = items or [_item("text", "")]
        return self._response(choice.finish, usage)

    def encode(self, frame: ResponseModel) -> bytes:
        kind = frame.type if isinstance(frame, ResponsesEvent) else "error"
        return f"event: {kind}\n".encode() + super().encode(frame)

    def begin(self) -> Frames:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response().model_dump())

    def progress(self, progress: PromptProgress) -> Frames:
        """Yield the response as it is, once more, with the progress beside it."""
        response, shown = self._response().model_dump(), progress.model_dump()
        yield self._event("response.in_progress", response=response, prompt_progress=shown)

    def step(self, step: Step) -> Frames:
        self._logprobs += _of_tokens(step.logprobs)
        for delta in step.deltas:
            yield from self._delta(delta)

    def finish(self, finish: Finish) -> Frames:
        if not self._items:
            yield from self._open("text", "")
        yield from self._close()
        self._end = finish

    def end(self, usage: Usage) -> Frames:
        response = self._response(self._end, usage)
        yield self._event(f"response.{response.status}", response=response.model_dump())

    def failure(self, failure: Failure) -> Frames:
        detail = failure.error.body.error
        error = {"code": detail.code or detail.type, "message": detail.message}
        response = self._response().model_dump() | {"status": "failed", "error": error}
        yield self._event("response.failed", response=response)
        yield self._event("error", **error, param=detail.param)

    # --- items ---------------------------------------------------------------------------------

    def _delta(self, delta: Delta) -> Frames:
        match delta:
            case TextDelta(text):
                yield from self._text("message", "text", text)
            case ReasoningDelta(text):
                yield from self._text("reasoning", "reasoning", text)
            case ToolCallBegin(_, id, name):
                yield from self._open("call", ToolCallContent(id, name))
            case ToolCallArguments(_, text):
                item = self._items[-1]
                item["arguments"] += text
                yield self._of_item("response.function_call_arguments.delta", delta=text)

    def _text(self, item_type: str, kind: str, text: str) -> Frames:
        if not self._is_open or self._items[-1]["type"] != item_type:
            yield from self._open(kind, "")
        part = self._items[-1]["content"][0]
        part["text"] += text
        more: Fields = {"content_index": 0, "delta": text}
        if kind == "text":
            logprobs, self._logprobs = self._logprobs, []
            part["logprobs"] += logprobs
            more["logprobs"] = logprobs
        yield self._of_item(f"response.{part['type']}.delta", **more)

    def _open(self, kind: str, value: Any) -> Frames:
        yield from self._close()
        item = _item(kind, value) | {"status": "in_progress"}
        self._items.append(item)
        self._is_open = True
        shown = {**item, "content": []} if "content" in item else item
        yield self._added("response.output_item.added", shown)
        if "content" in item:
            yield self._of_item("response.content_part.added", content_index=0, part=_copy(item))

    def _close(self) -> Frames:
        if not self._is_open:
            return
        item, self._is_open = self._items[-1], False
        item["status"] = "completed"
        if item["type"] == "function_call":
            more = {"name": item["name"], "arguments": item["arguments"]}
            yield self._of_item("response.function_call_arguments.done", **more)
        else:
            part = _copy(item)
            more = {key: part[key] for key in ("text", "logprobs") if key in part}
            yield self._of_item(f"response.{part['type']}.done", content_index=0, **more)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        yield self._added("response.output_item.done", item)

    def _added(self, kind: str, item: Fields) -> ResponsesEvent:
        return self._event(kind, output_index=len(self._items) - 1, item=item)

    def _of_item(self, kind: str, **more: Any) -> ResponsesEvent:
        index = len(self._items) - 1
        return self._event(kind, item_id=self._items[-1]["id"], output_index=index, **more)

    def _event(self, kind: str, **fields: Any) -> ResponsesEvent:
        self._number += 1
        return ResponsesEvent(type=kind, sequence_number=self._number, **fields)

    # --- the response --------------------------------------------------------------------------

    def _response(self, end: Finish | None = None, usage: Usage | None = None) -> ResponseObject:
        body, is_cut = self._request, end is not None and end.reason == "length"
        if end is not None:
            for item in self._items:
                item["status"] = "completed"
            if is_cut and self._items:
                self._items[-1]["status"] = "incomplete"
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        choice = body.tool_choice
        return ResponseObject(
            id=self._id,
            object="response",
            created_at=self._created,
            status="in_progress" if end is None else "incomplete" if is_cut else "completed",
            model=self.model,
            output=self._items,
            error=None,
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=None,
            reasoning={} if body.reasoning is None else body.reasoning.model_dump(),
            store=False,
            temperature=self.job.temperature,
            text={"format": {"type": "text"}}
            if body.text is None or body.text.format is None
            else body.text.model_dump(exclude_none=True, by_alias=True),
            tool_choice=(choice or "auto") if not hasattr(choice, "model_dump") else choice,
            tools=tools,
            top_p=self.job.top_p,
            truncation="disabled",
            usage=None if usage is None else _usage(usage),
        )


def _of_tokens(logprobs: Any) -> list[Any]:
    return [] if logprobs is None else list(logprobs["content"])


def _item(kind: str, value: Any) -> Fields:
    if kind == "call":
        return {
            "id": f"fc_{secrets.token_hex(12)}",
            "type": "function_call",
            "call_id": value.id,
            "name": value.name,
            "arguments": value.arguments,
            "status": "completed",
        }
    if kind == "reasoning":
        content: list[Fields] = [{"type": "reasoning_text", "text": value}]
        more: Fields = {"type": "reasoning", "summary": []}
    else:
        content = [{"type": "output_text", "text": value, "annotations": [], "logprobs": []}]
        more = {"type": "message", "role": "assistant"}
    prefix = "rs" if kind == "reasoning" else "msg"
    return {"id": f"{prefix}_{secrets.token_hex(12)}", **more, "content": content} | {
        "status": "completed"
    }


def _copy(item: Fields) -> Fields:
    return dict(item["content"][0])


def _usage(usage: Usage) -> Fields:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
