"""Conversion of results to responses, whole or as the events of a stream."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec import __version__
from specdec.async_llm import AsyncChunk
from specdec.engine.outputs import CompletionOutput, GenerationResult
from specdec.metrics.stats import ratio
from specdec.serve import responses
from specdec.serve.jobs import Job
from specdec.serve.responses import Chunk, ToolCall
from specdec.serve.tools import ToolCallParser
from specdec.text.contract import TokenSpeller
from specdec.text.logprobs import chat_logprobs, completion_logprobs
from specdec.text.token_strings import TokenStrings

Fields = Mapping[str, Any]
_NO_FIELDS: Fields = {}


class Answer(ABC):
    """Answer of one endpoint. Choices are counted over all prompts of a request."""

    id_prefix: str
    response: tuple[type[responses.ChatCompletion | responses.Completion], str]
    """Model of a whole answer, and its `object`."""
    chunk: tuple[type[Chunk], str]

    def __init__(self, model: str, job: Job, tokenizer: TokenSpeller) -> None:
        self._job, self._tokenizer = job, tokenizer
        self._envelope: Fields = {
            "id": self.id_prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"specdec-{__version__}",
        }
        self._token_strings: dict[int, TokenStrings] = {}

    @abstractmethod
    def _choice(self, index: int, output: CompletionOutput) -> Fields:
        """Return a choice of a whole answer, all but its index and log-probabilities."""

    @abstractmethod
    def _logprobs_of(self, strings: TokenStrings, part: Any) -> Fields:
        """Return log-probabilities of a part that has some, in the endpoint's shape."""

    @abstractmethod
    def first_events(self) -> Iterator[Chunk]: ...

    @abstractmethod
    def events(self, chunk: AsyncChunk, choice: int) -> Iterator[Chunk]: ...

    @abstractmethod
    def last_events(self, output: CompletionOutput, choice: int) -> Iterator[Chunk]: ...

    def whole(self, results: Sequence[GenerationResult]) -> responses.ResponseModel:
        outputs = [
            output
            for result in results
            for _ in range(self._job.n_copies)
            for output in result.outputs
        ]
        choices = [
            {
                "index": index,
                "logprobs": self._logprobs(index, output),
                **self._choice(index, output),
                **output.note,
            }
            for index, output in enumerate(outputs)
        ]
        model, kind = self.response
        body = {**self._envelope, "object": kind, "choices": choices, "timings": timings(results)}
        return model.model_validate({**body, "usage": usage(results, self._job)})

    def usage_event(self, results: Sequence[GenerationResult]) -> Chunk:
        event = self._chunk([])
        event.usage, event.timings = usage(results, self._job), timings(results)
        return event

    def _chunk(self, choices: Sequence[Fields]) -> Chunk:
        model, kind = self.chunk
        return model.model_validate({**self._envelope, "object": kind, "choices": choices})

    def _event(
        self,
        index: int,
        part: Fields,
        logprobs: Fields | None = None,
        reason: str | None = None,
        note: Fields = _NO_FIELDS,
    ) -> Chunk:
        choice = {"index": index, **part, "logprobs": logprobs, "finish_reason": reason, **note}
        return self._chunk([choice])

    def _logprobs(self, choice: int, part: CompletionOutput | AsyncChunk) -> Fields | None:
        if part.logprobs is None or not part.token_ids:
            return None
        if choice not in self._token_strings:
            prompt_ids = self._job.prompts[choice // self._job.n_per_prompt]
            self._token_strings[choice] = TokenStrings(self._tokenizer, prompt_ids)
        return self._logprobs_of(self._token_strings[choice], part)

    def _with_draft(self, event: Chunk, chunk: AsyncChunk, text: str) -> Chunk:
        """Add to an event how much was drafted: all but the last token of a forward pass."""
        if self._job.tells_draft:
            n_accepted = max(len(chunk.token_ids) - 1, 0)
            data = b"".join(map(self._tokenizer.token_bytes, chunk.token_ids[:n_accepted]))
            accepted = data.decode("utf-8", errors="ignore")
            event.draft = responses.Draft(
                n_tokens=len(chunk.token_ids),
                n_accepted=n_accepted,
                n_accepted_characters=min(len(accepted), len(text)),
            )
        return event


class ChatAnswer(Answer):
    id_prefix = "chatcmpl-"
    response = responses.ChatCompletion, "chat.completion"
    chunk = responses.ChatCompletionChunk, "chat.completion.chunk"

    def __init__(self, model: str, job: Job, tokenizer: TokenSpeller) -> None:
        super().__init__(model, job, tokenizer)
        self._parsers: dict[int, ToolCallParser] = {}

    def _parser(self, choice: int) -> ToolCallParser | None:
        if not self._job.tools:
            return None
        if choice not in self._parsers:
            self._parsers[choice] = ToolCallParser(self._job.tools, self._job.max_calls)
        return self._parsers[choice]

    def _choice(self, index: int, output: CompletionOutput) -> Fields:
        content, parser = output.text, self._parser(index)
        calls: list[ToolCall] = []
        if parser is not None:
            shown = parser.push(output.text)
            rest, calls = parser.finish()
            content = shown + rest
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        return {
            "message": message,
            "finish_reason": "tool_calls" if calls else output.finish_reason,
        }

    def first_events(self) -> Iterator[Chunk]:
        for index in range(self._job.n_choices):
            yield self._event(index, {"delta": {"role": "assistant", "content": ""}})

    def events(self, chunk: AsyncChunk, choice: int) -> Iterator[Chunk]:
        parser = self._parser(choice)
        text = chunk.text if parser is None else parser.push(chunk.text)
        logprobs = self._logprobs(choice, chunk)
        if text or logprobs or self._job.tells_draft:
            event = self._event(choice, {"delta": {"content": text}}, logprobs)
            yield self._with_draft(event, chunk, text)

    def last_events(self, output: CompletionOutput, choice: int) -> Iterator[Chunk]:
        parser, reason = self._parser(choice), output.finish_reason
        if parser is not None:
            rest, calls = parser.finish()
            if rest:
                yield self._event(choice, {"delta": {"content": rest}})
            for i, call in enumerate(calls):
                delta = {"tool_calls": [{"index": i, **call.model_dump()}]}
                yield self._event(choice, {"delta": delta})
            reason = "tool_calls" if calls else reason
        yield self._event(choice, {"delta": {}}, None, reason, output.note)

    def _logprobs_of(self, strings: TokenStrings, part: Any) -> Fields:
        n_top = self._job.params.n_top_logprobs
        return chat_logprobs(strings, part.token_ids, part.logprobs, part.top_logprobs, n_top)


class CompletionAnswer(Answer):
    id_prefix = "cmpl-"
    response = responses.Completion, "text_completion"
    chunk = responses.CompletionChunk, "text_completion"

    def _choice(self, index: int, output: CompletionOutput) -> Fields:
        return {"text": self._echoed(index) + output.text, "finish_reason": output.finish_reason}

    def _echoed(self, choice: int) -> str:
        return self._job.echoed[choice // self._job.n_per_prompt] if self._job.echoed else ""

    def first_events(self) -> Iterator[Chunk]:
        for index in range(self._job.n_choices if self._job.echoed else 0):
            yield self._event(index, {"text": self._echoed(index)})

    def events(self, chunk: AsyncChunk, choice: int) -> Iterator[Chunk]:
        logprobs = self._logprobs(choice, chunk)
        if chunk.text or logprobs or self._job.tells_draft:
            event = self._event(choice, {"text": chunk.text}, logprobs)
            yield self._with_draft(event, chunk, chunk.text)

    def last_events(self, output: CompletionOutput, choice: int) -> Iterator[Chunk]:
        yield self._event(choice, {"text": ""}, None, output.finish_reason, output.note)

    def _logprobs_of(self, strings: TokenStrings, part: Any) -> Fields:
        return completion_logprobs(strings, part.token_ids, part.logprobs, part.top_logprobs)


def usage(results: Sequence[GenerationResult], job: Job) -> responses.Usage:
    """Return OpenAI's counts."""
    stats = [result.stats for result in results]
    n_prompt = sum(stat.prompt_tokens for stat in stats)
    n_tokens = job.n_copies * sum(
        len(output.token_ids) for result in results for output in result.outputs
    )
    n_accepted = sum(stat.accepted_tokens for stat in stats)
    return responses.Usage(
        prompt_tokens=n_prompt,
        completion_tokens=n_tokens,
        total_tokens=n_prompt + n_tokens,
        prompt_tokens_details=responses.PromptTokensDetails(
            cached_tokens=sum(stat.reused_prompt_tokens for stat in stats)
        ),
        completion_tokens_details=responses.CompletionTokensDetails(
            accepted_prediction_tokens=n_accepted,
            rejected_prediction_tokens=sum(stat.drafted_tokens for stat in stats) - n_accepted,
            reasoning_tokens=0,
        ),
    )


def timings(results: Sequence[GenerationResult]) -> responses.Timings:
    stats = [result.stats for result in results]
    n_tokens = sum(stat.generated_tokens for stat in stats)
    seconds = sum(stat.decode_seconds for stat in stats)
    passes = sum(stat.passes for stat in stats)
    n_accepted = sum(stat.accepted_tokens for stat in stats)
    return responses.Timings(
        prompt_n=sum(stat.prompt_tokens - stat.reused_prompt_tokens for stat in stats),
        prompt_ms=1000 * sum(stat.time_to_first_token for stat in stats),
        predicted_n=n_tokens,
        predicted_ms=1000 * seconds,
        predicted_per_second=ratio(n_tokens - len(stats), seconds),
        draft_n=sum(stat.drafted_tokens for stat in stats),
        draft_n_accepted=n_accepted,
        passes=passes,
        tokens_per_pass=1.0 + ratio(n_accepted, passes),
        bytes_streamed=sum(stat.bytes_streamed for stat in stats),
        stall_ms=1000 * sum(stat.stall_seconds for stat in stats),
    )
