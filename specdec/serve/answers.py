"""Answers in OpenAI's shape, whole or as a stream of events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from specdec import __version__
from specdec.async_llm import AsyncChunk
from specdec.engine.outputs import CompletionOutput, GenerationResult
from specdec.metrics.stats import ratio
from specdec.serve.jobs import Job
from specdec.serve.tools import ToolCall, ToolCallParser
from specdec.text.contract import TokenSpeller
from specdec.text.logprobs import chat_logprobs, completion_logprobs
from specdec.text.token_texts import TokenTexts


class Answer(Protocol):
    """Of one endpoint. Choices are counted over all prompts of a request."""

    def whole(self, results: Sequence[GenerationResult]) -> dict[str, Any]: ...

    def first_events(self) -> Iterator[dict[str, Any]]: ...

    def events(self, chunk: AsyncChunk, choice: int) -> Iterator[dict[str, Any]]: ...

    def last_events(self, output: CompletionOutput, choice: int) -> Iterator[dict[str, Any]]: ...

    def usage_event(self, results: Sequence[GenerationResult]) -> dict[str, Any]: ...


@dataclass
class _Envelope:
    """What every answer and event has around its choices."""

    model: str
    job: Job
    tokenizer: TokenSpeller
    id_prefix: str
    kind: str
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = self.id_prefix + secrets.token_hex(12)
        self._texts: dict[int, TokenTexts] = {}

    def token_texts(self, choice: int) -> TokenTexts:
        """Log-probabilities of the choice's tokens, in the order in which they come."""
        if choice not in self._texts:
            prompt_ids = self.job.prompts[choice // self.job.n_per_prompt]
            self._texts[choice] = TokenTexts(self.tokenizer, prompt_ids)
        return self._texts[choice]

    def envelope(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"specdec-{__version__}",
            "choices": list(choices),
        }

    def with_draft(self, told: dict[str, Any], chunk: AsyncChunk, text: str) -> dict[str, Any]:
        """An event with what had been drafted of it: all but the last token of a pass."""
        if not self.job.tells_draft:
            return told
        n_accepted = max(len(chunk.token_ids) - 1, 0)
        data = b"".join(map(self.tokenizer.token_bytes, chunk.token_ids[:n_accepted]))
        accepted = data.decode("utf-8", errors="ignore")
        told["draft"] = {
            "n_tokens": len(chunk.token_ids),
            "n_accepted": n_accepted,
            "n_accepted_characters": min(len(accepted), len(text)),
        }
        return told

    def with_usage(
        self, envelope: dict[str, Any], results: Sequence[GenerationResult]
    ) -> dict[str, Any]:
        return {**envelope, "usage": usage(results, self.job), "timings": timings(results)}

    def choices_of(
        self, results: Sequence[GenerationResult]
    ) -> Iterator[tuple[int, CompletionOutput]]:
        """(index, text) of every choice, equal ones included."""
        index = 0
        for result in results:
            for _ in range(self.job.n_copies):
                for output in result.outputs:
                    yield index, output
                    index += 1


class ChatAnswer(_Envelope):
    def __init__(self, model: str, job: Job, tokenizer: TokenSpeller) -> None:
        super().__init__(model, job, tokenizer, "chatcmpl-", "chat.completion")
        self._parsers: dict[int, ToolCallParser] = {}

    def _parser(self, choice: int) -> ToolCallParser | None:
        if not self.job.tools:
            return None
        if choice not in self._parsers:
            self._parsers[choice] = ToolCallParser(self.job.tools, self.job.most_calls)
        return self._parsers[choice]

    def whole(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        choices = [self._choice(index, output) for index, output in self.choices_of(results)]
        return self.with_usage(self.envelope(self.kind, choices), results)

    def _choice(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        content, parser = output.text, self._parser(index)
        calls: list[ToolCall] = []
        if parser is not None:
            shown = parser.push(output.text)
            rest, calls = parser.finish()
            content = shown + rest
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [call.to_dict() for call in calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(index, output),
            "finish_reason": "tool_calls" if calls else output.finish_reason,
            **output.note,
        }

    def first_events(self) -> Iterator[dict[str, Any]]:
        for index in range(self.job.n_choices):
            yield self._event(index, {"role": "assistant", "content": ""})

    def events(self, chunk: AsyncChunk, choice: int) -> Iterator[dict[str, Any]]:
        parser = self._parser(choice)
        text = chunk.text if parser is None else parser.push(chunk.text)
        logprobs = self._logprobs(choice, chunk)
        if text or logprobs or self.job.tells_draft:
            yield self.with_draft(self._event(choice, {"content": text}, logprobs), chunk, text)

    def last_events(self, output: CompletionOutput, choice: int) -> Iterator[dict[str, Any]]:
        parser, reason = self._parser(choice), output.finish_reason
        if parser is not None:
            rest, calls = parser.finish()
            if rest:
                yield self._event(choice, {"content": rest})
            for i, call in enumerate(calls):
                yield self._event(choice, {"tool_calls": [{"index": i, **call.to_dict()}]})
            reason = "tool_calls" if calls else reason
        told = self._event(choice, {}, reason=reason)
        told["choices"][0] |= output.note
        yield told

    def _event(
        self, choice: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None
    ) -> dict[str, Any]:
        one = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self.envelope("chat.completion.chunk", [one])

    def usage_event(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        return self.with_usage(self.envelope("chat.completion.chunk", []), results)

    def _logprobs(self, choice: int, told: CompletionOutput | AsyncChunk) -> dict[str, Any] | None:
        if told.logprobs is None or not told.token_ids:
            return None
        texts, n_top = self.token_texts(choice), self.job.params.n_top_logprobs
        return chat_logprobs(texts, told.token_ids, told.logprobs, told.top_logprobs, n_top)


class CompletionAnswer(_Envelope):
    def __init__(self, model: str, job: Job, tokenizer: TokenSpeller) -> None:
        super().__init__(model, job, tokenizer, "cmpl-", "text_completion")

    def whole(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        choices = []
        for index, output in self.choices_of(results):
            logprobs = self._logprobs(index, output)
            text = self._echoed(index) + output.text
            told = self._choice(index, text, logprobs, output.finish_reason)
            choices.append({**told, **output.note})
        return self.with_usage(self.envelope(self.kind, choices), results)

    def _echoed(self, choice: int) -> str:
        return self.job.echoed[choice // self.job.n_per_prompt] if self.job.echoed else ""

    def first_events(self) -> Iterator[dict[str, Any]]:
        for index in range(self.job.n_choices if self.job.echoed else 0):
            yield self._event(index, self._echoed(index))

    def events(self, chunk: AsyncChunk, choice: int) -> Iterator[dict[str, Any]]:
        logprobs = self._logprobs(choice, chunk)
        if chunk.text or logprobs or self.job.tells_draft:
            yield self.with_draft(self._event(choice, chunk.text, logprobs), chunk, chunk.text)

    def last_events(self, output: CompletionOutput, choice: int) -> Iterator[dict[str, Any]]:
        told = self._event(choice, "", None, output.finish_reason)
        told["choices"][0] |= output.note
        yield told

    def _event(
        self, choice: int, text: str, logprobs: Any = None, reason: str | None = None
    ) -> dict[str, Any]:
        return self.envelope(self.kind, [self._choice(choice, text, logprobs, reason)])

    @staticmethod
    def _choice(index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def usage_event(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        return self.with_usage(self.envelope(self.kind, []), results)

    def _logprobs(self, choice: int, told: CompletionOutput | AsyncChunk) -> dict[str, Any] | None:
        if told.logprobs is None or not told.token_ids:
            return None
        texts = self.token_texts(choice)
        return completion_logprobs(texts, told.token_ids, told.logprobs, told.top_logprobs)


def usage(results: Sequence[GenerationResult], job: Job) -> dict[str, Any]:
    """OpenAI's counts. Draft tokens that were right are part of the text, those that were wrong
    are not: `rejected_prediction_tokens` are counted nowhere else."""
    n_prompt = sum(result.stats.prompt_tokens for result in results)
    n_tokens = job.n_copies * sum(
        len(output.token_ids) for result in results for output in result.outputs
    )
    n_drafted = sum(result.stats.drafted_tokens for result in results)
    n_accepted = sum(result.stats.accepted_tokens for result in results)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_tokens,
        "total_tokens": n_prompt + n_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(result.stats.reused_prompt_tokens for result in results)
        },
        "completion_tokens_details": {
            "accepted_prediction_tokens": n_accepted,
            "rejected_prediction_tokens": n_drafted - n_accepted,
            "reasoning_tokens": 0,
        },
    }


def timings(results: Sequence[GenerationResult]) -> dict[str, Any]:
    """The names are llama.cpp's as far as it has them."""
    stats = [result.stats for result in results]
    n_computed = sum(one.prompt_tokens - one.reused_prompt_tokens for one in stats)
    n_tokens = sum(one.generated_tokens for one in stats)
    seconds = sum(one.decode_seconds for one in stats)
    passes = sum(one.passes for one in stats)
    n_accepted = sum(one.accepted_tokens for one in stats)
    return {
        "prompt_n": n_computed,
        "prompt_ms": 1000 * sum(one.time_to_first_token for one in stats),
        "predicted_n": n_tokens,
        "predicted_ms": 1000 * seconds,
        "predicted_per_second": ratio(n_tokens - len(stats), seconds),
        "draft_n": sum(one.drafted_tokens for one in stats),
        "draft_n_accepted": n_accepted,
        "passes": passes,
        "tokens_per_pass": 1.0 + ratio(n_accepted, passes),
        "bytes_streamed": sum(one.bytes_streamed for one in stats),
        "stall_ms": 1000 * sum(one.stall_seconds for one in stats),
    }
