"""Answers to requests as the models of responses, whole or as the events of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from specdec import __version__
from specdec.async_llm import AsyncChunk
from specdec.decoding.rounds.sequences import CompletionOutput, GenerationResult
from specdec.decoding.rounds.stats import ratio
from specdec.serve.jobs import Job
from specdec.serve.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Chunk,
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    CompletionTokensDetails,
    Draft,
    PromptTokensDetails,
    ResponseModel,
    Timings,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from specdec.serve.tools import ToolCallParser
from specdec.text.contract import TokenSpeller
from specdec.text.logprobs import chat_logprobs, completion_logprobs
from specdec.text.token_texts import TokenTexts


class Answer(Protocol):
    """The answer of one endpoint. Choices are counted over all prompts of a request."""

    def whole(self, results: Sequence[GenerationResult]) -> ResponseModel: ...

    def first_events(self) -> Iterator[Chunk]: ...

    def events(self, chunk: AsyncChunk, choice: int) -> Iterator[Chunk]: ...

    def last_events(self, output: CompletionOutput, choice: int) -> Iterator[Chunk]: ...

    def usage_event(self, results: Sequence[GenerationResult]) -> Chunk: ...


class _Answer:
    """The parts that both endpoints share."""

    id_prefix = ""

    def __init__(self, model: str, job: Job, tokenizer: TokenSpeller) -> None:
        self._job, self._tokenizer = job, tokenizer
        self._envelope: Mapping[str, Any] = {
            "id": self.id_prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"specdec-{__version__}",
        }
        self._token_texts: dict[int, TokenTexts] = {}

    def _event(self, *choices: Any) -> Chunk:
        """Return an event with these choices."""
        raise NotImplementedError

    def _texts(self, choice: int) -> TokenTexts:
        """Return the texts of the choice's tokens, to be pushed in the order in which they come."""
        if choice not in self._token_texts:
            prompt_ids = self._job.prompts[choice // self._job.n_per_prompt]
            self._token_texts[choice] = TokenTexts(self._tokenizer, prompt_ids)
        return self._token_texts[choice]

    def _with_draft(self, event: Chunk, chunk: AsyncChunk, text: str) -> Chunk:
        """Add how much of an event was drafted: all but the last token of a forward pass."""
        if self._job.tells_draft:
            n_accepted = max(len(chunk.token_ids) - 1, 0)
            data = b"".join(map(self._tokenizer.token_bytes, chunk.token_ids[:n_accepted]))
            accepted = data.decode("utf-8", errors="ignore")
            event.draft = Draft(
                n_tokens=len(chunk.token_ids),
                n_accepted=n_accepted,
                n_accepted_characters=min(len(accepted), len(text)),
            )
        return event

    def usage_event(self, results: Sequence[GenerationResult]) -> Chunk:
        event = self._event()
        event.usage, event.timings = usage(results, self._job), timings(results)
        return event

    def _outputs(
        self, results: Sequence[GenerationResult]
    ) -> Iterator[tuple[int, CompletionOutput]]:
        """(index, output) of every choice, equal ones included."""
        index = 0
        for result in results:
            for _ in range(self._job.n_copies):
                for output in result.outputs:
                    yield index, output
                    index += 1


class ChatAnswer(_Answer):
    id_prefix = "chatcmpl-"

    def __init__(self, model: str, job: Job, tokenizer: TokenSpeller) -> None:
        super().__init__(model, job, tokenizer)
        self._parsers: dict[int, ToolCallParser] = {}

    def _parser(self, choice: int) -> ToolCallParser | None:
        if not self._job.tools:
            return None
        if choice not in self._parsers:
            self._parsers[choice] = ToolCallParser(self._job.tools, self._job.most_calls)
        return self._parsers[choice]

    def whole(self, results: Sequence[GenerationResult]) -> ChatCompletion:
        return ChatCompletion(
            **self._envelope,
            object="chat.completion",
            choices=[self._choice(index, output) for index, output in self._outputs(results)],
            usage=usage(results, self._job),
            timings=timings(results),
        )

    def _choice(self, index: int, output: CompletionOutput) -> ChatChoice:
        content, parser = output.text, self._parser(index)
        calls: list[ToolCall] = []
        if parser is not None:
            shown = parser.push(output.text)
            rest, calls = parser.finish()
            content = shown + rest
        message = ChatMessage(
            role="assistant",
            content=content or None if calls else content,
            refusal=None,
            **({"tool_calls": calls} if calls else {}),
        )
        reason: Any = "tool_calls" if calls else output.finish_reason
        return ChatChoice(
            index=index,
            message=message,
            logprobs=self._logprobs(index, output),
            finish_reason=reason,
            **output.note,
        )

    def first_events(self) -> Iterator[Chunk]:
        for index in range(self._job.n_choices):
            yield self._delta(index, ChatDelta(role="assistant", content=""))

    def events(self, chunk: AsyncChunk, choice: int) -> Iterator[Chunk]:
        parser = self._parser(choice)
        text = chunk.text if parser is None else parser.push(chunk.text)
        logprobs = self._logprobs(choice, chunk)
        if text or logprobs or self._job.tells_draft:
            event = self._delta(choice, ChatDelta(content=text), logprobs)
            yield self._with_draft(event, chunk, text)

    def last_events(self, output: CompletionOutput, choice: int) -> Iterator[Chunk]:
        parser, reason = self._parser(choice), output.finish_reason
        if parser is not None:
            rest, calls = parser.finish()
            if rest:
                yield self._delta(choice, ChatDelta(content=rest))
            for i, call in enumerate(calls):
                delta = ToolCallDelta(index=i, id=call.id, type=call.type, function=call.function)
                yield self._delta(choice, ChatDelta(tool_calls=[delta]))
            reason = "tool_calls" if calls else reason
        yield self._delta(choice, ChatDelta(), reason=reason, note=output.note)

    def _delta(
        self,
        choice: int,
        delta: ChatDelta,
        logprobs: ChatLogprobs | None = None,
        reason: Any = None,
        note: Mapping[str, str] | None = None,
    ) -> Chunk:
        return self._event(
            ChatChunkChoice(
                index=choice, delta=delta, logprobs=logprobs, finish_reason=reason, **(note or {})
            )
        )

    def _event(self, *choices: ChatChunkChoice) -> Chunk:
        return ChatCompletionChunk(
            **self._envelope, object="chat.completion.chunk", choices=list(choices)
        )

    def _logprobs(self, choice: int, part: CompletionOutput | AsyncChunk) -> ChatLogprobs | None:
        if part.logprobs is None or not part.token_ids:
            return None
        texts, n_top = self._texts(choice), self._job.params.n_top_logprobs
        found = chat_logprobs(texts, part.token_ids, part.logprobs, part.top_logprobs, n_top)
        return ChatLogprobs.model_validate(found)


class CompletionAnswer(_Answer):
    id_prefix = "cmpl-"

    def whole(self, results: Sequence[GenerationResult]) -> Completion:
        choices = []
        for index, output in self._outputs(results):
            reason: Any = output.finish_reason
            choices.append(
                CompletionChoice(
                    index=index,
                    text=self._echoed(index) + output.text,
                    logprobs=self._logprobs(index, output),
                    finish_reason=reason,
                    **output.note,
                )
            )
        return Completion(
            **self._envelope,
            object="text_completion",
            choices=choices,
            usage=usage(results, self._job),
            timings=timings(results),
        )

    def _echoed(self, choice: int) -> str:
        return self._job.echoed[choice // self._job.n_per_prompt] if self._job.echoed else ""

    def first_events(self) -> Iterator[Chunk]:
        for index in range(self._job.n_choices if self._job.echoed else 0):
            yield self._delta(index, self._echoed(index))

    def events(self, chunk: AsyncChunk, choice: int) -> Iterator[Chunk]:
        logprobs = self._logprobs(choice, chunk)
        if chunk.text or logprobs or self._job.tells_draft:
            event = self._delta(choice, chunk.text, logprobs)
            yield self._with_draft(event, chunk, chunk.text)

    def last_events(self, output: CompletionOutput, choice: int) -> Iterator[Chunk]:
        yield self._delta(choice, "", None, output.finish_reason, output.note)

    def _delta(
        self,
        choice: int,
        text: str,
        logprobs: CompletionLogprobs | None = None,
        reason: Any = None,
        note: Mapping[str, str] | None = None,
    ) -> Chunk:
        return self._event(
            CompletionChunkChoice(
                index=choice, text=text, logprobs=logprobs, finish_reason=reason, **(note or {})
            )
        )

    def _event(self, *choices: CompletionChunkChoice) -> Chunk:
        return CompletionChunk(**self._envelope, object="text_completion", choices=list(choices))

    def _logprobs(
        self, choice: int, part: CompletionOutput | AsyncChunk
    ) -> CompletionLogprobs | None:
        if part.logprobs is None or not part.token_ids:
            return None
        texts = self._texts(choice)
        found = completion_logprobs(texts, part.token_ids, part.logprobs, part.top_logprobs)
        return CompletionLogprobs.model_validate(found)


def usage(results: Sequence[GenerationResult], job: Job) -> Usage:
    """Return OpenAI's counts."""
    stats = [result.stats for result in results]
    n_prompt = sum(one.prompt_tokens for one in stats)
    n_tokens = job.n_copies * sum(
        len(output.token_ids) for result in results for output in result.outputs
    )
    n_accepted = sum(one.accepted_tokens for one in stats)
    return Usage(
        prompt_tokens=n_prompt,
        completion_tokens=n_tokens,
        total_tokens=n_prompt + n_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=sum(one.reused_prompt_tokens for one in stats)
        ),
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=n_accepted,
            rejected_prediction_tokens=sum(one.drafted_tokens for one in stats) - n_accepted,
            reasoning_tokens=0,
        ),
    )


def timings(results: Sequence[GenerationResult]) -> Timings:
    stats = [result.stats for result in results]
    n_tokens = sum(one.generated_tokens for one in stats)
    seconds = sum(one.decode_seconds for one in stats)
    passes = sum(one.passes for one in stats)
    n_accepted = sum(one.accepted_tokens for one in stats)
    return Timings(
        prompt_n=sum(one.prompt_tokens - one.reused_prompt_tokens for one in stats),
        prompt_ms=1000 * sum(one.time_to_first_token for one in stats),
        predicted_n=n_tokens,
        predicted_ms=1000 * seconds,
        predicted_per_second=ratio(n_tokens - len(stats), seconds),
        draft_n=sum(one.drafted_tokens for one in stats),
        draft_n_accepted=n_accepted,
        passes=passes,
        tokens_per_pass=1.0 + ratio(n_accepted, passes),
        bytes_streamed=sum(one.bytes_streamed for one in stats),
        stall_ms=1000 * sum(one.stall_seconds for one in stats),
    )
