"""Answers of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec import __version__
from specdec.dialogue.deltas import (
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallBegin,
)
from specdec.serve import responses
from specdec.serve.api.answer import Answer, Frames
from specdec.serve.events import (
    Choice,
    Finish,
    Step,
    Usage,
)
from specdec.serve.jobs import JobHead
from specdec.serve.responses import Chunk

Fields = Mapping[str, Any]


class OpenAiAnswer(Answer):
    """The part that both endpoints share."""

    closing = b"data: [DONE]\n\n"
    id_prefix: str
    response: tuple[type[responses.ChatCompletion | responses.Completion], str]
    """Model of a whole answer, and its `object`."""
    chunk: tuple[type[Chunk], str]

    def __init__(self, model: str, job: JobHead, request: Any = None) -> None:
        super().__init__(model, job, request)
        self._envelope: Fields = {
            "id": self.id_prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"specdec-{__version__}",
        }

    @abstractmethod
    def _choice(self, choice: Choice) -> Fields:
        """Return a choice of a whole answer, all but its index, end and log-probabilities."""

    @abstractmethod
    def _part(self, deltas: Sequence[Delta]) -> Fields:
        """Return the choice of an event with these deltas, all but its index."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> responses.ResponseModel:
        model, kind = self.response
        fields = [
            {
                "index": choice.index,
                "logprobs": choice.logprobs,
                **self._choice(choice),
                "finish_reason": choice.finish.reason,
                **_note(choice.finish),
            }
            for choice in choices
        ]
        body = {**self._envelope, "object": kind, "choices": fields, "timings": usage.timings}
        body |= self._body_fields(choices)
        return model.model_validate({**body, "usage": openai_usage(usage)})

    def _body_fields(self, choices: Sequence[Choice]) -> Fields:
        """Return further fields of a whole answer."""
        return {}

    def step(self, step: Step) -> Frames:
        if step.deltas or step.logprobs or step.draft is not None:
            choice = {**self._part(step.deltas), "logprobs": step.logprobs, "finish_reason": None}
            event = self._event(step.choice, choice, step.usage)
            if step.draft is not None:
                event.draft = responses.Draft(**step.draft)
            yield event

    def progress(self, progress: responses.PromptProgress) -> Frames:
        event = self._event(0, {**self._part([]), "logprobs": None, "finish_reason": None})
        event.prompt_progress = progress
        yield event

    def finish(self, finish: Finish) -> Frames:
        end = {"logprobs": None, "finish_reason": finish.reason, **_note(finish)}
        yield self._event(finish.choice, {**self._part([]), **end}, finish.usage)

    def end(self, usage: Usage) -> Frames:
        if self.job.tells_usage:
            event = self._chunk([])
            event.usage = openai_usage(usage)
            event.timings = responses.Timings(**usage.timings)
            yield event

    def _chunk(self, choices: Sequence[Fields]) -> Chunk:
        model, kind = self.chunk
        return model.model_validate({**self._envelope, "object": kind, "choices": choices})

    def _event(self, index: int, choice: Fields, usage: Usage | None = None) -> Chunk:
        event = self._chunk([{"index": index, **choice}])
        if usage is not None:
            event.timings = responses.Timings(**usage.timings)
        return event


class ChatAnswer(OpenAiAnswer):
    id_prefix = "chatcmpl-"
    response = responses.ChatCompletion, "chat.completion"
    chunk = responses.ChatCompletionChunk, "chat.completion.chunk"

    def _choice(self, choice: Choice) -> Fields:
        content = choice.content
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in content.calls
        ]
        message: dict[str, Any] = {"role": "assistant", "content": content.text, "refusal": None}
        if content.reasoning:
            message |= {"reasoning_content": content.reasoning, "reasoning": content.reasoning}
        if calls:
            message |= {"content": content.text or None, "tool_calls": calls}
        return {"message": message}

    def _body_fields(self, choices: Sequence[Choice]) -> Fields:
        return _prompt_logprobs(choices[0])  # all are of one prompt

    def begin(self) -> Frames:
        end = {"logprobs": None, "finish_reason": None}
        for index in range(self.job.n_choices):
            yield self._event(index, {"delta": {"role": "assistant", "content": ""}, **end})

    def _part(self, deltas: Sequence[Delta]) -> Fields:
        text = [delta.text for delta in deltas if isinstance(delta, TextDelta)]
        reasoning = [delta.text for delta in deltas if isinstance(delta, ReasoningDelta)]
        fields: dict[str, Any] = {"content": "".join(text)} if text else {}
        if reasoning:
            fields |= dict.fromkeys(("reasoning_content", "reasoning"), "".join(reasoning))
        calls = list(_call_deltas(deltas))
        return {"delta": {**fields, **({"tool_calls": calls} if calls else {})}}


class CompletionAnswer(OpenAiAnswer):
    id_prefix = "cmpl-"
    response = responses.Completion, "text_completion"
    chunk = responses.CompletionChunk, "text_completion"

    def _choice(self, choice: Choice) -> Fields:
        text = self._echoed(choice.index) + choice.content.text
        return {"text": text, **_prompt_logprobs(choice)}

    def _echoed(self, choice: int) -> str:
        return self.job.echoed[choice // self.job.n_per_prompt] if self.job.echoed else ""

    def begin(self) -> Frames:
        end = {"logprobs": None, "finish_reason": None}
        for index in range(self.job.n_choices if self.job.echoed else 0):
            yield self._event(index, {"text": self._echoed(index), **end})

    def _part(self, deltas: Sequence[Delta]) -> Fields:
        return {"text": "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))}


def _prompt_logprobs(choice: Choice) -> Fields:
    return {} if choice.prompt_logprobs is None else {"prompt_logprobs": choice.prompt_logprobs}


def _call_deltas(deltas: Sequence[Delta]) -> Iterator[Fields]:
    for delta in deltas:
        match delta:
            case ToolCallBegin(index, id, name):
                function = {"name": name, "arguments": ""}
                yield {"index": index, "id": id, "type": "function", "function": function}
            case ToolCallArguments(index, text):
                yield {"index": index, "function": {"arguments": text}}


def _note(finish: Finish) -> Fields:
    return {} if finish.note is None else {"finish_note": finish.note}


def openai_usage(usage: Usage) -> responses.Usage:
    """Return OpenAI's counts."""
    return responses.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=responses.PromptTokensDetails(cached_tokens=usage.cached_tokens),
        completion_tokens_details=responses.CompletionTokensDetails(
            accepted_prediction_tokens=usage.accepted_tokens,
            rejected_prediction_tokens=usage.rejected_tokens,
            reasoning_tokens=usage.reasoning_tokens,
        ),
    )
