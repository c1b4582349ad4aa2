"""Conversion of the engine's output to events, whole or as it comes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from specdec.async_llm import AsyncChunk
from specdec.dialogue.deltas import (
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolCallBegin,
    ToolCallCut,
)
from specdec.engine.sequences.outputs import CompletionOutput, GenerationResult
from specdec.metrics.stats import ratio
from specdec.sampling.logprobs import PromptLogprobs
from specdec.serve.events import (
    Choice,
    Content,
    Finish,
    OutputParser,
    Step,
    Usage,
)
from specdec.serve.jobs import Job
from specdec.text.contract import TokenSpeller
from specdec.text.logprobs import (
    ScoredTokens,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    with_prompt,
)
from specdec.text.token_strings import TokenStrings


class OutputEvents:
    """Events of one request. Choices are counted over all prompts of it.

    tokenizer: spells tokens with log-probabilities. new_parser: returns a parser for a sequence.
    results: returns those of the prompts so far.
    """

    def __init__(
        self,
        job: Job,
        tokenizer: TokenSpeller,
        new_parser: Callable[[], OutputParser],
        results: Callable[[], Sequence[GenerationResult]],
    ) -> None:
        self._job, self._tokenizer, self._results = job, tokenizer, results
        self._token_strings: dict[int, TokenStrings] = {}
        self._parsers: dict[int, OutputParser] = defaultdict(new_parser)
        self._num_calls: Counter[int] = Counter()
        self._call_notes: dict[int, str] = {}

    def step(self, chunk: AsyncChunk, choice: int, prompt: PromptLogprobs | None = None) -> Step:
        """Return the event of new tokens of a sequence. prompt: log-probabilities of its prompt's
        tokens, if they were requested."""
        if self._job.drops_output:
            chunk = replace(chunk, text="", token_ids=(), logprobs=chunk.logprobs and ())
        pushed = self._parsers[choice].push(chunk.text, chunk.token_ids)
        deltas, logprobs = self._shown(choice, pushed), self._logprobs(choice, chunk, prompt)
        draft = self._draft(chunk, deltas) if self._job.tells_draft else None
        return Step(choice, deltas, logprobs, draft, self._usage_so_far())

    def finish(self, output: CompletionOutput, choice: int) -> Iterator[Step | Finish]:
        """Yield the events of a sequence's end."""
        if self._job.drops_output:
            output = replace(output, finish_reason="length", stop=None)
        deltas = self._shown(choice, self._parsers[choice].finish(output.finish_reason))
        if self._job.includes_stop and output.stop is not None:
            deltas.append(TextDelta(output.stop))
        usage = self._usage_so_far()
        if deltas:
            yield Step(choice, deltas, usage=usage)
        is_call = self._num_calls[choice] > 0 and output.finish_reason == "stop"
        reason = "tool_calls" if is_call else output.finish_reason
        notes = filter(None, (output.finish_note, self._call_notes.get(choice)))
        yield Finish(choice, reason, output.stop, "; ".join(notes) or None, usage)

    def whole(self) -> list[Choice]:
        """Return the finished sequences."""
        outputs = [
            (output, result.prompt_logprobs)
            for result in self._results()
            for _ in range(self._job.n_copies)
            for output in result.outputs
        ]
        return [self._choice(index, *output) for index, output in enumerate(outputs)]

    def _choice(
        self, index: int, output: CompletionOutput, prompt: PromptLogprobs | None
    ) -> Choice:
        if self._job.drops_output:
            logprobs = None if output.logprobs is None else ()
            output = CompletionOutput("", (), "length", logprobs, logprobs and ())
        content = Content()
        for delta in self._shown(index, self._parsers[index].push(output.text, output.token_ids)):
            content.add(delta)
        finish = Finish(index, output.finish_reason)
        for event in self.finish(output, index):
            if isinstance(event, Finish):
                finish = event
                continue
            for delta in event.deltas:
                content.add(delta)
        content.drop_cut_calls()
        logprobs = self._logprobs(index, output, prompt)
        return Choice(index, content, finish, logprobs, self._prompt_logprobs(index, prompt))

    def _logprobs(
        self, choice: int, part: CompletionOutput | AsyncChunk, prompt: PromptLogprobs | None
    ) -> Any:
        if part.logprobs is None:
            return None
        job, prompt_ids = self._job, self._prompt_ids(choice)
        tokens = ScoredTokens(part.token_ids, part.logprobs, part.top_logprobs)
        if choice not in self._token_strings:
            if job.echoes_logprobs and prompt is not None:
                tokens = with_prompt(prompt_ids, prompt, tokens, job.params.n_top_logprobs)
                prompt_ids = ()
            self._token_strings[choice] = TokenStrings(self._tokenizer, prompt_ids)
        if not tokens.token_ids:
            return None
        strings = self._token_strings[choice]
        if job.has_chat_logprobs:
            ids, logprobs, top = part.token_ids, part.logprobs, part.top_logprobs
            return chat_logprobs(strings, ids, logprobs, top, job.params.n_top_logprobs)
        return completion_logprobs(strings, *tokens)

    def _prompt_logprobs(self, choice: int, prompt: PromptLogprobs | None) -> list[Any] | None:
        n_top = self._job.prompt_logprobs
        if prompt is None or n_top is None:
            return None
        return prompt_logprobs(self._tokenizer, self._prompt_ids(choice), prompt, n_top)

    def _prompt_ids(self, choice: int) -> Sequence[int]:
        return self._job.prompts[choice // self._job.n_per_prompt]

    def _draft(self, chunk: AsyncChunk, deltas: Sequence[Delta]) -> dict[str, int]:
        """Return how much of an event was drafted: all but the last token of a forward pass."""
        num_characters = sum(len(delta.text) for delta in deltas if isinstance(delta, TextDelta))
        n_accepted = max(len(chunk.token_ids) - 1, 0)
        data = b"".join(map(self._tokenizer.token_bytes, chunk.token_ids[:n_accepted]))
        accepted = data.decode("utf-8", errors="ignore")
        return {
            "n_tokens": len(chunk.token_ids),
            "n_accepted": n_accepted,
            "n_accepted_characters": min(len(accepted), num_characters),
        }

    def _shown(self, choice: int, deltas: Sequence[Delta]) -> list[Delta]:
        for delta in deltas:
            match delta:
                case ToolCallBegin():
                    self._num_calls[choice] += 1
                case ToolCallCut(index, note):
                    self._num_calls[choice] -= index is not None
                    self._call_notes[choice] = note
        hides = not self._job.tells_reasoning
        return [delta for delta in deltas if not (hides and isinstance(delta, ReasoningDelta))]

    def _usage_so_far(self) -> Usage | None:
        return self.usage if self._job.tells_timings else None

    @property
    def usage(self) -> Usage:
        results = self._results()
        stats = [result.stats for result in results]
        n_accepted = sum(stat.accepted_tokens for stat in stats)
        return Usage(
            prompt_tokens=sum(stat.prompt_tokens for stat in stats),
            cached_tokens=sum(stat.reused_prompt_tokens for stat in stats),
            completion_tokens=(0 if self._job.drops_output else self._job.n_copies)
            * sum(len(output.token_ids) for result in results for output in result.outputs),
            reasoning_tokens=sum(parser.num_reasoning_tokens for parser in self._parsers.values()),
            accepted_tokens=n_accepted,
            rejected_tokens=sum(stat.drafted_tokens for stat in stats) - n_accepted,
            timings=timings(results),
        )


def timings(results: Sequence[GenerationResult]) -> dict[str, Any]:
    """Return the fields of `responses.Timings`."""
    stats = [result.stats for result in results]
    n_tokens = sum(stat.generated_tokens for stat in stats)
    seconds = sum(stat.decode_seconds for stat in stats)
    passes = sum(stat.passes for stat in stats)
    n_accepted = sum(stat.accepted_tokens for stat in stats)
    n_prompt = sum(stat.prompt_tokens - stat.reused_prompt_tokens for stat in stats)
    waits = [max(stat.time_to_first_token - stat.queue_seconds, 0.0) for stat in stats]
    n_decoded = n_tokens - len(stats)  # the first one of each prompt comes with the prompt
    return {
        "cache_n": sum(stat.reused_prompt_tokens for stat in stats),
        "prompt_n": n_prompt,
        "prompt_ms": 1000 * sum(waits),
        "prompt_per_token_ms": 1000 * ratio(sum(waits), n_prompt),
        "prompt_per_second": ratio(n_prompt, sum(waits)),
        "predicted_n": n_tokens,
        "predicted_ms": 1000 * seconds,
        "predicted_per_token_ms": 1000 * ratio(seconds, n_decoded),
        "predicted_per_second": ratio(n_decoded, seconds),
        "draft_n": sum(stat.drafted_tokens for stat in stats),
        "draft_n_accepted": n_accepted,
        "passes": passes,
        "tokens_per_pass": 1.0 + ratio(n_accepted, passes),
        "bytes_streamed": sum(stat.bytes_streamed for stat in stats),
        "stall_ms": 1000 * sum(stat.stall_seconds for stat in stats),
    }
