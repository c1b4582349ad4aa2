"""Answers of /v1/messages, in Anthropic's shapes."""

from __future__ import annotations

import secrets
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
from specdec.serve.api.ollama_answer import arguments
from specdec.serve.errors import anthropic_error
from specdec.serve.events import (
    Choice,
    Failure,
    Finish,
    Step,
    Usage,
)
from specdec.serve.jobs import JobHead
from specdec.serve.responses import Count, PromptProgress, ResponseModel

Fields = dict[str, Any]
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnthropicUsage(ResponseModel):
    """Counts; tokens found in the prefix cache are not among the input's."""

    input_tokens: Count
    output_tokens: Count
    cache_read_input_tokens: Count
    cache_creation_input_tokens: Count


class AnthropicResponse(ResponseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage


class TokenCount(ResponseModel):
    input_tokens: Count


class MessagesEvent(ResponseModel):
    """Event of a stream; its other fields depend on its type."""

    model_config = {"extra": "allow"}
    type: str

    @classmethod
    def of(cls, kind: str, **fields: Any) -> MessagesEvent:
        return cls.model_validate({"type": kind, **fields})


class MessagesAnswer(Answer):
    """Answer of one sequence, as content blocks."""

    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, model: str, job: JobHead, request: Any = None) -> None:
        super().__init__(model, job, request)
        self._id = f"msg_{secrets.token_hex(12)}"
        self._num_blocks, self._open_type = 0, ""
        self._end: Finish | None = None

    def whole(self, choices: Sequence[Choice], usage: Usage) -> ResponseModel:
        choice = choices[0]
        blocks = [_block(kind, value) for kind, value in choice.content.parts]
        return self._message(blocks, choice.finish, usage)

    def encode(self, frame: ResponseModel) -> bytes:
        kind = getattr(frame, "type", "error")
        return f"event: {kind}\n".encode() + super().encode(frame)

    def begin(self) -> Frames:
        usage = Usage(self.job.num_prompt_tokens, 0, 0, 0, 0, 0, {})
        message = self._message([], None, usage).model_dump()
        yield MessagesEvent.of("message_start", message=message)

    def progress(self, progress: PromptProgress) -> Frames:
        """Yield a ping with the progress: clients skip pings."""
        yield MessagesEvent.of("ping", prompt_progress=progress.model_dump())

    def step(self, step: Step) -> Frames:
        for delta in step.deltas:
            yield from self._delta(delta)

    def finish(self, finish: Finish) -> Frames:
        yield from self._close()
        self._end = finish

    def end(self, usage: Usage) -> Frames:
        counts = _usage(usage).model_dump()
        yield MessagesEvent.of("message_delta", delta=_stop(self._end), usage=counts)
        yield MessagesEvent.of("message_stop")

    def failure(self, failure: Failure) -> Frames:
        yield anthropic_error(failure.error)

    def _delta(self, delta: Delta) -> Frames:
        match delta:
            case TextDelta(text):
                yield from self._add("text", {"type": "text_delta", "text": text})
            case ReasoningDelta(text):
                yield from self._add("thinking", {"type": "thinking_delta", "thinking": text})
            case ToolCallBegin(_, id, name):
                yield from self._open({"type": "tool_use", "id": id, "name": name, "input": {}})
            case ToolCallArguments(_, text):
                yield from self._add("tool_use", {"type": "input_json_delta", "partial_json": text})

    def _add(self, kind: str, delta: Fields) -> Frames:
        if self._open_type != kind:
            yield from self._open(_block("reasoning" if kind == "thinking" else kind, ""))
        yield self._of_block("content_block_delta", delta=delta)

    def _open(self, block: Fields) -> Frames:
        yield from self._close()
        self._open_type = block["type"]
        self._num_blocks += 1
        yield self._of_block("content_block_start", content_block=block)

    def _close(self) -> Frames:
        if self._open_type == "thinking":
            signature = {"type": "signature_delta", "signature": ""}
            yield self._of_block("content_block_delta", delta=signature)
        if self._open_type:
            yield self._of_block("content_block_stop")
        self._open_type = ""

    def _of_block(self, kind: str, **more: Any) -> MessagesEvent:
        return MessagesEvent.of(kind, index=self._num_blocks - 1, **more)

    def _message(self, blocks: list[Fields], end: Finish | None, usage: Usage) -> AnthropicResponse:
        return AnthropicResponse(
            id=self._id,
            type="message",
            role="assistant",
            model=self.model,
            content=blocks,
            usage=_usage(usage),
            **_stop(end),
        )


def _stop(end: Finish | None) -> Fields:
    if end is None:
        return {"stop_reason": None, "stop_sequence": None}
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    reason = "stop_sequence" if end.stop is not None else reasons[end.reason]
    return {"stop_reason": reason, "stop_sequence": end.stop}


def _block(kind: str, value: Any) -> Fields:
    if kind == "text":
        return {"type": "text", "text": value}
    if kind == "reasoning":
        return {"type": "thinking", "thinking": value, "signature": ""}
    given = arguments(value.arguments)
    return {"type": "tool_use", "id": value.id, "name": value.name, "input": given}


def _usage(usage: Usage) -> AnthropicUsage:
    return AnthropicUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        cache_creation_input_tokens=0,
    )
