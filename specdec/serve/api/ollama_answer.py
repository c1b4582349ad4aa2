"""Answers of Ollama's /api/chat and /api/generate, and its descriptions of the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from specdec.dialogue.deltas import ReasoningDelta, TextDelta
from specdec.serve.api.answer import Answer, Frames
from specdec.serve.errors import OllamaError
from specdec.serve.events import (
    Choice,
    Content,
    Failure,
    Finish,
    Step,
    Usage,
)
from specdec.serve.jobs import JobHead
from specdec.serve.responses import PromptProgress, ResponseModel, to_json

_NANOSECONDS = 1_000_000  # in a millisecond


class OllamaResponse(ResponseModel):
    """A whole answer, or a line of a stream, the last of which has the counts."""

    model: str
    created_at: str
    done: bool
    done_reason: str = ""
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0
    prompt_progress: PromptProgress | None = None


class OllamaChatResponse(OllamaResponse):
    message: dict[str, Any]


class OllamaGenerateResponse(OllamaResponse):
    response: str
    thinking: str = ""


class OllamaModel(ResponseModel):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: dict[str, Any]
    expires_at: str = ""
    size_vram: int = 0
    context_length: int = 0


class OllamaModels(ResponseModel):
    models: list[OllamaModel]


class OllamaShow(ResponseModel):
    modelfile: str
    parameters: str
    template: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(ResponseModel):
    version: str


class OllamaChatAnswer(Answer):
    """Answer of one sequence: a line of JSON for each event. Calls are sent whole, at the end."""

    media_type = "application/x-ndjson"

    def __init__(self, model: str, job: JobHead, request: Any = None) -> None:
        super().__init__(model, job, request)
        self._calls = Content()
        self._end: Finish | None = None

    @property
    def ping(self) -> bytes:  # type: ignore[override]  # lines have no comments
        return self.encode(self._line({"content": ""}))

    def whole(self, choices: Sequence[Choice], usage: Usage) -> ResponseModel:
        content, finish = choices[0].content, choices[0].finish
        fields: dict[str, Any] = {"content": content.text}
        if content.reasoning:
            fields["thinking"] = content.reasoning
        if content.calls:
            fields["tool_calls"] = _calls(content)
        return self._line(fields, **_counts(finish, usage))

    def encode(self, frame: ResponseModel) -> bytes:
        return to_json(frame.model_dump(exclude_unset=True)) + b"\n"

    def begin(self) -> Frames:
        return iter(())

    def progress(self, progress: PromptProgress) -> Frames:
        """Yield a line without text, with the progress beside it."""
        yield self._line({"content": ""}, prompt_progress=progress)

    def step(self, step: Step) -> Frames:
        for delta in step.deltas:
            match delta:
                case TextDelta(text):
                    yield self._line({"content": text})
                case ReasoningDelta(text):
                    yield self._line({"content": "", "thinking": text})
                case _:
                    self._calls.add(delta)

    def finish(self, finish: Finish) -> Frames:
        self._end = finish
        if self._calls.calls:
            yield self._line({"content": "", "tool_calls": _calls(self._calls)})

    def end(self, usage: Usage) -> Frames:
        yield self._line({"content": ""}, **_counts(self._end, usage))

    def failure(self, failure: Failure) -> Frames:
        yield OllamaError(error=failure.error.message)

    def _line(self, fields: Mapping[str, Any], *, done: bool = False, **more: Any) -> ResponseModel:
        message = {"role": "assistant", **fields}
        return OllamaChatResponse(
            model=self.model, created_at=now(), message=message, done=done, **more
        )


class OllamaGenerateAnswer(OllamaChatAnswer):
    def _line(self, fields: Mapping[str, Any], *, done: bool = False, **more: Any) -> ResponseModel:
        if "thinking" in fields:
            more["thinking"] = fields["thinking"]
        return OllamaGenerateResponse(
            model=self.model, created_at=now(), response=fields["content"], done=done, **more
        )


def _calls(content: Content) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "function": {"name": call.name, "arguments": arguments(call.arguments)}}
        for call in content.calls
    ]


def arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call; {} for those that were cut off."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _counts(end: Finish | None, usage: Usage) -> dict[str, Any]:
    prompt_ms, eval_ms = usage.timings["prompt_ms"], usage.timings["predicted_ms"]
    return {
        "done": True,
        "done_reason": "length" if end is not None and end.reason == "length" else "stop",
        "total_duration": round(_NANOSECONDS * (prompt_ms + eval_ms)),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": round(_NANOSECONDS * prompt_ms),
        "eval_count": usage.completion_tokens,
        "eval_duration": round(_NANOSECONDS * eval_ms),
    }


def now() -> str:
    return as_time(datetime.now(timezone.utc).timestamp())


def as_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")
