"""One generation: from prompt ids to chunks of text, with its statistics."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from backends.contract.backend import Backend, BackendError, StreamUse
from offload.process.interruptible import POLL_SECONDS
from offload.process.memory import process_memory
from specdec.analysis.utilization import ModelFlops
from specdec.checks import ConfigError
from specdec.config import SpecConfig
from specdec.decoding.beams import BeamDecoder, Hypothesis, check_beams
from specdec.decoding.errors import ModelBusy, ModelClosed, ModelElsewhere
from specdec.decoding.recorder import StatsRecorder
from specdec.decoding.sequences import (
    GeneratedSequence,
    GenerationResult,
    StreamChunk,
    sequence_seed,
)
from specdec.decoding.session import make_controller
from specdec.decoding.stats import GenerationStats
from specdec.decoding.watched_target import WatchedTarget
from specdec.drafters.base import Drafter
from specdec.planning.gpu import vram_peak_bytes
from specdec.planning.run_options import CUDA
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import Sampler
from specdec.text.detokenizer import TextStream
from specdec.verification.acceptance import Acceptance
from specdec.verification.tree import DraftTree

if TYPE_CHECKING:
    from specdec.api import LLM

PLAIN = SpecConfig(spec_type=())
_ONE_TOKEN = (DraftTree(0), Acceptance((0,), 0, is_bonus=False))
"""For the statistics: a pass of beam search brings all beams one token further."""


class GenerationStream:
    """Iterator over `StreamChunk`s. `result` is there once it is exhausted, cancelled or failed."""

    def __init__(
        self,
        llm: LLM,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        spec: SpecConfig,
        processors: Sequence[Any],
        cache_prompt: bool = True,
        drafter: Drafter | None = None,
    ) -> None:
        self._llm = llm
        self._cache_prompt = cache_prompt
        self._prompt_ids = prompt_ids
        self._params = params
        self._processors = processors
        self._spec = spec
        self._drafter = drafter
        self._recorder = StatsRecorder(prompt_tokens=len(prompt_ids))
        self._limit = _token_limit(params, len(prompt_ids), llm.max_context)
        self._sequences = [self._new_sequence(params)]
        if params.num_beams > 1:
            check_beams(params.num_beams, self._spec, llm.max_beams)
        self._use_before: StreamUse | None = None  # of bytes and stalls, when this one began
        self._stats: GenerationStats | None = None
        self.is_cancelled = False
        self._thread_id = 0  # of the thread that computes, while one does
        self._chunks = self._tracked(self._run())

    def __iter__(self) -> Iterator[StreamChunk]:
        return self

    def __next__(self) -> StreamChunk:
        if self.is_cancelled:
            self._wait_for_its_end()
            raise StopIteration
        if self._is_computing:
            raise ModelBusy
        try:
            return next(self._chunks)
        except Exception as error:
            if self.is_cancelled and (isinstance(error, BackendError) or _is_reentry(error)):
                self._wait_for_its_end()
                raise StopIteration from error
            if _is_reentry(error):
                raise ModelBusy from error
            if self._llm.is_closed and not isinstance(error, (StopIteration, ModelClosed)):
                raise ModelClosed from error
            raise

    def cancel(self) -> None:
        """End here; what was generated so far is the result. Any thread may call it.

        A pass that another thread is in is cut short, and its `next` ends the iteration. Raises
        ModelBusy inside of the generation itself (in a logits processor, say).
        """
        if self._llm.is_forked and self._is_computing:
            raise ModelElsewhere  # the thread that computes is not in this process
        if self._is_computing and not self.is_computing_elsewhere:
            raise ModelBusy
        self.is_cancelled = True
        self.end(lambda: self._llm.request_cancel(self))

    def end(self, poll: Callable[[], None] = lambda: None) -> None:
        """The same for what no thread computes; raises ModelBusy where one does that was not told
        to end. `poll` is called every now and then while one that was told has not ended."""
        while True:
            self._wait_for_its_end(poll)
            try:
                self._chunks.close()
                break
            except ValueError as error:  # another thread entered it meanwhile
                if not _is_reentry(error):
                    raise
                if not self.is_cancelled or self._thread_id == threading.get_ident():
                    raise ModelBusy from error
        self._finish()

    def _wait_for_its_end(self, poll: Callable[[], None] = lambda: None) -> None:
        """Where it was cancelled, return when no other thread is inside of it."""
        while self.is_cancelled and self.is_computing_elsewhere:
            poll()
            time.sleep(POLL_SECONDS)

    @property
    def is_computing_elsewhere(self) -> bool:
        """Whether another thread is inside of `next`."""
        return self._is_computing and self._thread_id != threading.get_ident()

    @property
    def _is_computing(self) -> bool:
        return inspect.getgeneratorstate(self._chunks) == inspect.GEN_RUNNING

    @property
    def result(self) -> GenerationResult:
        """The text so far; complete once the iterator is exhausted."""
        outputs = tuple(sequence.output for sequence in self._sequences)
        return GenerationResult(outputs, self._stats or self._measure())

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
            self._thread_id = threading.get_ident()
            chunks.close()
            self._thread_id = 0

    def _run(self) -> Generator[StreamChunk, None, None]:
        try:
            self._llm.begin(self)
            self._llm.check_open()
            self._llm.ahead.settle()  # an interrupt may have left it at work
            if not self._cache_prompt:
                self._llm.forget_prompt()
            self._use_before = self._llm.target.stream_use
            # The request begins with the first chunk asked for, not when the stream was made.
            self._recorder = StatsRecorder(prompt_tokens=len(self._prompt_ids))
            yield from self._search() if self._params.num_beams > 1 else self._sample()
        finally:
            self._finish()

    def _sample(self) -> Generator[StreamChunk, None, None]:
        """Sequence after sequence; all but the first take up the prompt's KV and logits."""
        params, target = self._params, self._llm.target
        if params.n > 1 or params.n_top_logprobs:
            target = cast(Backend, WatchedTarget(target, self._n_tokens, params.n_top_logprobs))
        seed = self._sequences[0].sampler.seed
        for index in range(params.n):
            if index > 0:
                own = params.replace(seed=sequence_seed(seed, index))
                self._sequences.append(self._new_sequence(own))
            for text, tokens in self._decode(self._sequences[index], target):
                yield StreamChunk(text, tokens, index)

    def _decode(
        self, sequence: GeneratedSequence, target: Backend
    ) -> Generator[tuple[str, tuple[int, ...]], None, None]:
        controller = make_controller(
            self._llm,
            target,
            sequence.sampler,
            self._params,
            self._spec,
            self._recorder,
            self._drafter,
        )
        sequence.logprobs = controller.logprobs
        first = controller.start(self._prompt_ids)
        if isinstance(target, WatchedTarget):
            sequence.top_logprobs = target.top_logprobs
        yield sequence.take((first,))
        while sequence.is_open:
            self._check_going_on()
            tree, acceptance, tokens = controller.step(sequence.n_left)
            text, taken = sequence.take(tokens)
            self._recorder.record_round(tree, acceptance, n_emitted=len(taken))
            yield text, taken
        rest = sequence.flush()
        if rest:
            yield rest, ()

    def _search(self) -> Generator[StreamChunk, None, None]:
        """Beam search: what its sequences are is known at the end only."""
        params, sampler = self._params, self._sequences[0].sampler
        stops = None
        if params.stop:
            stops = TextStream(self._llm.tokenizer, prompt_ids=self._prompt_ids, stop=params.stop)
        decoder = BeamDecoder(self._llm.target, sampler, self._prompt_ids, self._limit, stops)
        try:
            decoder.start()
            self._recorder.record_first_token(decoder.n_reused)
            while not decoder.is_over:
                self._check_going_on()
                with self._recorder.verifying():
                    decoder.step()
                self._recorder.record_round(*_ONE_TOKEN)
        finally:
            found = decoder.results(params.n)
            self._sequences = [self._from_beam(sampler, one, score) for one, score in found]
        for index, sequence in enumerate(self._sequences):
            output = sequence.output
            yield StreamChunk(output.text, output.token_ids, index)

    def _from_beam(self, sampler: Sampler, found: Hypothesis, score: float) -> GeneratedSequence:
        sequence = GeneratedSequence(self._llm.tokenizer, self._prompt_ids, sampler, self._limit)
        sequence.logprobs, sequence.top_logprobs = found.logprobs, found.top_logprobs
        sequence.score = score
        if found.token_ids:
            sequence.take(found.token_ids)
            sequence.flush()
        return sequence

    @property
    def _n_tokens(self) -> int:
        """Tokens that both the tokenizer and the target know."""
        return min(self._llm.tokenizer.n_tokens, self._llm.target.vocab_size)

    def _new_sequence(self, params: SamplingParams) -> GeneratedSequence:
        sampler = Sampler(
            params,
            n_tokens=self._n_tokens,
            eos_token_ids=self._llm.eos_token_ids,
            prompt_length=len(self._prompt_ids),
            logits_processors=self._processors,
        )
        return GeneratedSequence(self._llm.tokenizer, self._prompt_ids, sampler, self._limit)

    def _check_going_on(self) -> None:
        """Before a pass: a request to cut one short may have come while none was running."""
        self._llm.check_open()
        if self.is_cancelled:
            raise BackendError("the generation was cancelled")

    def _finish(self) -> None:
        if self._stats is None:
            self._stats = self._measure()

    def _measure(self) -> GenerationStats:
        llm = self._llm
        use = llm.target.stream_use
        before = self._use_before or use
        kv_bytes = sum(backend.kv_bytes for backend in llm.backends)
        flops = llm.model_flops
        used = sum(b.kv_bytes * b.n_committed / max(1, b.n_kv_allocated) for b in llm.backends)
        return self._recorder.finish(
            bytes_streamed=use.bytes_streamed - before.bytes_streamed,
            stall_seconds=use.stall_seconds - before.stall_seconds,
            bytes_copied_to_device=use.bytes_copied - before.bytes_copied,
            copy_stall_seconds=use.copy_stall_seconds - before.copy_stall_seconds,
            vram_peak_bytes=vram_peak_bytes() if llm.plan.device == CUDA else 0,
            vram_budget_bytes=llm.plan.vram_budget_bytes,
            peak_memory_bytes=process_memory().peak_rss_bytes,
            memory_budget_bytes=llm.plan.budget_bytes,
            kv_bytes=kv_bytes,
            kv_used_fraction=used / kv_bytes if kv_bytes else 0.0,
            model_flops=0 if flops is None else self._decoded_flops(flops),
            peak_flops_per_second=0.0 if flops is None else flops.peak_flops_per_second,
            is_lossless=self._spec.is_lossless,
        )

    def _decoded_flops(self, flops: ModelFlops) -> int:
        """Of all tokens but the first, which the prompt's pass brought; of beams one a position."""
        n_tokens = self._recorder.n_generated - 1
        if n_tokens < 1:
            return 0
        n_texts = 1 if self._params.num_beams > 1 else len(self._sequences)
        context = len(self._prompt_ids) + n_tokens // (2 * n_texts)
        return flops.of_tokens(n_tokens, context)


def _is_reentry(error: Exception) -> bool:
    """Whether the error is Python's own, of entering a generator that is being executed."""
    return isinstance(error, ValueError) and str(error) == "generator already executing"


def _token_limit(params: SamplingParams, n_prompt: int, max_context: int) -> int:
    """New tokens at most; like transformers, no limit that the prompt alone reaches."""
    limit = params.token_limit(n_prompt)
    if limit < 1:
        raise ConfigError(
            f"max_length is {params.max_length}, but the prompt alone has {n_prompt} tokens: "
            "raise it, or set max_tokens"
        )
    return min(limit, max_context - n_prompt)
