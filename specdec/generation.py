"""One generation: from prompt ids to chunks of text, with its statistics."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from backends.base import StreamUse
from offload.errors import SpecdecError
from offload.memory import process_memory
from specdec.config import ConfigError, SamplingParams, SpecConfig
from specdec.controller import Controller, NoDrafter
from specdec.drafters.base import Drafter
from specdec.drafters.merged import MergedDrafter
from specdec.drafters.model import ModelDrafter
from specdec.sampling import Sampler
from specdec.stats import GenerationStats, StatsRecorder
from specdec.text import TextStream

if TYPE_CHECKING:
    from specdec.api import LLM

_PLAIN = SpecConfig(spec_type=())
GREEDY_DRAFT_TEMPERATURE = 0.5
"""A greedy target takes its likeliest token, so the chance that a candidate is accepted is sharper
than its draft probability."""
_REJECTION_STREAM = 2**64 - 1
"""Key word of the rejection rule's random numbers; positions, the match rule's, never get there."""


class ModelClosed(SpecdecError):
    """A model was asked for something after its end."""

    def __init__(self) -> None:
        super().__init__("the model is closed; load it again")


class ModelBusy(SpecdecError):
    """A generation was asked for while another one computes."""

    def __init__(self) -> None:
        super().__init__(
            "an LLM runs one generation at a time: wait for the one that is running, "
            "or load the model once more"
        )


@dataclass(frozen=True)
class StreamChunk:
    """What one round added."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class GenerationResult:
    """A finished generation."""

    text: str
    token_ids: tuple[int, ...]
    """All new tokens, the one that ended the text included."""
    logprobs: tuple[float, ...] | None
    """log p of each token under the model itself, before any processor; None unless asked for."""
    finish_reason: str
    """"stop" (end-of-sequence or stop string), "length" or "cancelled"."""
    stats: GenerationStats


class GenerationStream:
    """Iterator over `StreamChunk`s. `result` is there once it is exhausted, cancelled or failed."""

    def __init__(
        self,
        llm: LLM,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        speculative: bool,
        processors: Sequence[Any],
        cache_prompt: bool = True,
    ) -> None:
        self._llm = llm
        self._cache_prompt = cache_prompt
        self._prompt_ids = prompt_ids
        self._params = params
        self._sampler = Sampler(
            params,
            n_tokens=min(llm.tokenizer.n_tokens, llm.target.vocab_size),
            eos_token_ids=llm.eos_token_ids,
            prompt_length=len(prompt_ids),
            logits_processors=processors,
        )
        self._spec = llm.spec if speculative else _PLAIN
        self._recorder = StatsRecorder(prompt_tokens=len(prompt_ids))
        self._logprobs: list[float] = []
        self._text = TextStream(llm.tokenizer, prompt_ids=prompt_ids, stop=params.stop)
        self._limit = _token_limit(params, len(prompt_ids), llm.max_context)
        self._token_ids: list[int] = []
        self._pieces: list[str] = []
        self._finish_reason = "cancelled"
        self._use_before: StreamUse | None = None  # of bytes and stalls, when this one began
        self._stats: GenerationStats | None = None
        self._thread_id = 0  # of the thread that computes, while one does
        self._chunks = self._tracked(self._run())

    def __iter__(self) -> Iterator[StreamChunk]:
        return self

    def __next__(self) -> StreamChunk:
        if self._is_computing:
            raise ModelBusy
        try:
            return next(self._chunks)
        except Exception as error:
            if self._is_executing(error):
                raise ModelBusy from error
            if self._llm.is_closed and not isinstance(error, (StopIteration, ModelClosed)):
                raise ModelClosed from error
            raise

    def cancel(self) -> None:
        """End here; what was generated so far is the result."""
        try:
            self._chunks.close()
        except ValueError as error:
            if self._is_executing(error):
                raise ModelBusy from error
            raise
        self._finish()

    @property
    def is_computing_elsewhere(self) -> bool:
        """Whether another thread is inside of `next`."""
        return self._is_computing and self._thread_id != threading.get_ident()

    @property
    def _is_computing(self) -> bool:
        return inspect.getgeneratorstate(self._chunks) == inspect.GEN_RUNNING

    def _is_executing(self, error: Exception) -> bool:
        """Whether the error is Python's own, of entering a generator twice."""
        return isinstance(error, ValueError) and self._is_computing

    @property
    def result(self) -> GenerationResult:
        """The text so far; complete once the iterator is exhausted."""
        logprobs = tuple(self._logprobs[: len(self._token_ids)])
        return GenerationResult(
            text="".join(self._pieces),
            token_ids=tuple(self._token_ids),
            logprobs=logprobs if self._params.logprobs else None,
            finish_reason=self._finish_reason,
            stats=self._stats or self._measure(),
        )

    def _tracked(
        self, chunks: Generator[StreamChunk, None, None]
    ) -> Generator[StreamChunk, None, None]:
        """The same, noting which thread is inside: only one can be, where this code runs."""
        try:
            while True:
                self._thread_id = threading.get_ident()
                chunk = next(chunks, None)
                self._thread_id = 0
                if chunk is None:
                    return
                yield chunk
        finally:
            self._thread_id = 0
            chunks.close()

    def _run(self) -> Generator[StreamChunk, None, None]:
        try:
            self._llm.begin(self)
            self._llm.check_open()
            if not self._cache_prompt:
                self._llm.forget_prompt()
            self._use_before = self._llm.target.stream_use
            # The request begins with the first chunk asked for, not when the stream was made.
            self._recorder = StatsRecorder(prompt_tokens=len(self._prompt_ids))
            controller = self._make_controller(self._spec)
            self._logprobs = controller.logprobs
            yield self._take((controller.start(self._prompt_ids),))
            while self._finish_reason == "cancelled":
                self._llm.check_open()
                tree, acceptance, tokens = controller.step(self._limit - len(self._token_ids))
                chunk = self._take(tokens)
                self._recorder.record_round(tree, acceptance, n_emitted=len(chunk.token_ids))
                yield chunk
            self._pieces.append(self._text.flush().text)
            if self._pieces[-1]:
                yield StreamChunk(self._pieces[-1], ())
        finally:
            self._finish()

    def _take(self, tokens: Sequence[int]) -> StreamChunk:
        """Count a round's tokens up to the end of the generation; their text."""
        update = self._text.push(t for t in tokens if t not in self._sampler.stop_tokens)
        if update.stop is not None:
            tokens = tokens[: update.n_tokens]
            self._finish_reason = "stop"
        elif tokens[-1] in self._sampler.stop_tokens:
            self._finish_reason = "stop"
        elif len(self._token_ids) + len(tokens) >= self._limit:
            self._finish_reason = "length"
        self._token_ids += tokens
        self._pieces.append(update.text)
        return StreamChunk(update.text, tuple(tokens))

    def _finish(self) -> None:
        if self._stats is None:
            self._stats = self._measure()

    def _measure(self) -> GenerationStats:
        llm = self._llm
        use = llm.target.stream_use
        before = self._use_before or use
        kv_bytes = sum(backend.kv_bytes for backend in llm.backends)
        used = sum(b.kv_bytes * b.n_committed / max(1, b.n_kv_allocated) for b in llm.backends)
        return self._recorder.finish(
            bytes_streamed=use.bytes_streamed - before.bytes_streamed,
            stall_seconds=use.stall_seconds - before.stall_seconds,
            peak_memory_bytes=process_memory().peak_rss_bytes,
            memory_budget_bytes=llm.plan.budget_bytes,
            kv_bytes=kv_bytes,
            kv_used_fraction=used / kv_bytes if kv_bytes else 0.0,
        )

    def _make_controller(self, spec: SpecConfig) -> Controller:
        rng = np.random.Generator(
            np.random.Philox(key=np.array([self._sampler.seed, _REJECTION_STREAM], dtype=np.uint64))
        )
        return Controller(
            self._llm.target,
            self._make_drafter(spec, rng),
            self._sampler,
            self._llm.policy(spec),
            recorder=self._recorder,
            acceptance=spec.acceptance,
            rng=rng,
            wants_logprobs=self._params.logprobs,
        )

    def _make_drafter(self, spec: SpecConfig, rng: np.random.Generator) -> Drafter:
        drafters: list[Drafter] = []
        if "draft" in spec.drafters and self._llm.draft is not None:
            chain = (self._sampler, rng) if spec.acceptance == "rejection" else None
            temperature = self._params.temperature or GREEDY_DRAFT_TEMPERATURE
            drafters.append(
                ModelDrafter(
                    self._llm.draft,
                    self._sampler.n_tokens,
                    chain=chain,
                    temperature=temperature,
                    window=self._llm.draft_window,
                )
            )
        if "ngram" in spec.drafters:
            ngram = self._llm.ngram_drafter()
            ngram.reset()  # a model's drafter finds by itself what its cache holds of the context
            drafters.append(ngram)
        if not drafters:
            return NoDrafter()
        return drafters[0] if len(drafters) == 1 else MergedDrafter(drafters)


def _token_limit(params: SamplingParams, n_prompt: int, max_context: int) -> int:
    """New tokens at most; like transformers, no limit that the prompt alone reaches."""
    limit = params.token_limit(n_prompt)
    if limit < 1:
        raise ConfigError(
            f"max_length is {params.max_length}, but the prompt alone has {n_prompt} tokens: "
            "raise it, or set max_tokens"
        )
    return min(limit, max_context - n_prompt)
