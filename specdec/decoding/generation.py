"""One generation: what a caller asked for becomes chunks of text, and figures of how."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from queue import SimpleQueue
from typing import Any

from backends.contract.backend import StreamUse
from backends.contract.sequence import SequenceRows, TokenSequence
from offload.process.memory import process_memory
from specdec.analysis.utilization import ModelFlops
from specdec.config import SpecConfig
from specdec.decoding.beams import BeamDecoder, Hypothesis, check_beams
from specdec.decoding.rounds.jobs import Job, SearchJob, TextJob
from specdec.decoding.rounds.recorder import StatsRecorder
from specdec.decoding.rounds.sequences import (
    CompletionOutput,
    GeneratedSequence,
    StreamChunk,
    sequence_seed,
)
from specdec.decoding.rounds.stats import GenerationStats, ratio
from specdec.decoding.rounds.text_decoder import TextDecoder
from specdec.decoding.session import Session
from specdec.decoding.token_limit import token_limit
from specdec.drafters.base import Drafter
from specdec.planning.gpu import vram_peak_bytes
from specdec.run_options import CUDA
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import Sampler
from specdec.text.stream import TextStream
from specdec.verification.acceptance import Acceptance
from specdec.verification.tree import DraftTree

_ONE_TOKEN = (DraftTree(0), Acceptance((0,), 0, is_bonus=False))
"""For the statistics: a pass of beam search brings all beams one token further."""


@dataclass(frozen=True)
class Request:
    """What a caller asked for; the arguments of `LLM.stream`, resolved."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    spec: SpecConfig
    processors: Sequence[Any] = ()
    cache_prompt: bool = True
    priority: int = 0
    drafter: Drafter | None = None


class Generation:
    """The sequences that continue one prompt, and what they are computed with.

    Raises ConfigError where the session has no room for what is asked for.
    """

    def __init__(self, session: Session, request: Request) -> None:
        self._session, self._request = session, request
        self.is_streamed = True  # somebody reads its chunks as they come
        params = request.params
        contexts = session.target.max_context, session.model_context
        self._limit = token_limit(params, len(request.prompt_ids), *contexts)
        self._recorder = self._new_recorder()
        self._sequences = [self._new_sequence(params)]
        if params.num_beams > 1:
            check_beams(params.num_beams, request.spec, session.max_beams)
        self._use_before: StreamUse | None = None  # of bytes and stalls, when this one began
        self._n_starts = count()  # its `next` is atomic
        self.jobs: list[Job] = []
        self._error: BaseException | None = None
        self._stats: GenerationStats | None = None  # once it is over
        self.over = threading.Event()
        self.output: SimpleQueue[StreamChunk | None] = SimpleQueue()
        """Chunks, and None at the end."""
        self.on_output: Callable[[], None] = lambda: None
        """Called by the engine when there is something in `output`."""
        self.is_cancelled = False

    @property
    def outputs(self) -> tuple[CompletionOutput, ...]:
        """The sequences so far."""
        return tuple(sequence.output for sequence in self._sequences)

    @property
    def is_over(self) -> bool:
        return self.over.is_set()

    def start(self) -> None:
        """Hand it to the engine. Its clocks begin here, with the first chunk asked for, not when it
        was made; done once."""
        if next(self._n_starts) == 0:
            self._use_before = self._session.target.stream_use
            self._recorder = self._new_recorder()
            self._session.engine.start(self)

    def begin(self) -> None:
        """Make what is to be scheduled; in the engine's thread."""
        is_search = self._request.params.num_beams > 1
        self.jobs = [Beams(self)] if is_search else self._texts()
        for job in self.jobs:
            job.priority = self._request.priority

    def _new_recorder(self) -> StatsRecorder:
        return StatsRecorder(len(self._request.prompt_ids), totals=self._session.totals)

    def _texts(self) -> list[Job]:
        """One for each sequence, with seeds of their own."""
        params, seed = self._request.params, self._sequences[0].sampler.seed
        more = [params.replace(seed=sequence_seed(seed, i)) for i in range(1, params.n)]
        sequences = [self._sequences[0], *map(self._new_sequence, more)]
        jobs: list[Job] = [Continuation(self, one, i) for i, one in enumerate(sequences)]
        self._sequences = sequences
        return jobs

    @property
    def prompt_ids(self) -> Sequence[int]:
        return self._request.prompt_ids

    def decoder(self, sequence: GeneratedSequence) -> TextDecoder:
        request = self._request
        decoder = self._session.decoder(
            request.prompt_ids, sequence.sampler, request.spec, self._recorder, request.drafter
        )
        decoder.max_tokens = sequence.n_left
        sequence.logprobs, sequence.top_logprobs = decoder.logprobs, decoder.top_logprobs
        return decoder

    def is_turn_of(self, index: int) -> bool:
        """A caller's own drafter serves one sequence after the other."""
        earlier = self.jobs[:index]
        return self._request.drafter is None or all(job.is_complete for job in earlier)

    @property
    def is_fresh(self) -> bool:
        return not self._request.cache_prompt

    def end(self, error: BaseException | None = None) -> None:
        """Let nobody wait for it any more; error: what ended it, if not a job's. Idempotent."""
        if self.is_over:
            return
        try:
            self._error = next((job.error for job in self.jobs if job.error is not None), error)
            if self._error is None and not self.is_cancelled:
                self._session.check_figures(self._recorder.stats().pass_times)
            self._stats = self.stats()
        finally:
            self.over.set()
            self._put(None)

    def _put(self, chunk: StreamChunk | None) -> None:
        self.output.put(chunk)
        self.on_output()

    def take_error(self) -> BaseException | None:
        """What ended it, once."""
        error, self._error = self._error, None
        return None if self.is_cancelled else error

    def search(self, text: TokenSequence) -> BeamDecoder:
        """Beam search: what its sequences are is known at the end only.

        One that began before, and was cut short, counts for nothing.
        """
        request, sampler = self._request, self._sequences[0].sampler
        self._recorder.record_admitted()
        if self._recorder.stats().generated_tokens:
            self._recorder = StatsRecorder(len(request.prompt_ids))
        stops, prompt_ids = None, request.prompt_ids
        if request.params.stop:
            tokenizer = self._session.tokenizer
            stops = TextStream(tokenizer, prompt_ids=prompt_ids, stop=request.params.stop)
        return BeamDecoder(text, sampler, prompt_ids, self._limit.n_tokens, stops)

    def start_beams(self, decoder: BeamDecoder, text: TokenSequence, most: int | None) -> bool:
        """A pass over the prompt, or so many tokens of it; whether it has come to its end."""
        n_before, began = text.n_committed, time.perf_counter()
        is_there = decoder.start(most)
        if is_there:
            self._recorder.record_first_token(decoder.n_reused or 0)
        n_rows = text.n_committed - n_before
        self._session.totals.add(prompt_rows=n_rows)
        self._note_pass(n_rows, began)
        return is_there

    def step_beams(self, decoder: BeamDecoder) -> None:
        """A pass that brings every beam a token."""
        n_rows, began = len(decoder.pending), time.perf_counter()
        with self._recorder.verifying(n_rows):
            decoder.step()
        self._recorder.record_round(*_ONE_TOKEN)
        self._note_pass(n_rows, began)

    def _note_pass(self, n_rows: int, began: float) -> None:
        seconds = time.perf_counter() - began
        self._session.totals.add(passes=1, pass_rows=n_rows, pass_seconds=seconds)

    def take_beams(self, decoder: BeamDecoder) -> None:
        """The search is over."""
        sampler = self._sequences[0].sampler
        found = decoder.results(self._request.params.n)
        self._sequences = [self._from_beam(sampler, one, score) for one, score in found]
        for index, output in enumerate(self.outputs):
            self._put(StreamChunk(output.text, output.token_ids, index))

    def take(self, sequence: GeneratedSequence, index: int, decoder: TextDecoder) -> None:
        """What a step brought for one sequence."""
        text, taken = sequence.take(decoder.news)
        if decoder.round is not None:
            tree, acceptance, _ = decoder.round
            self._recorder.record_round(tree, acceptance, n_emitted=len(taken))
        decoder.max_tokens = sequence.n_left
        self._put(StreamChunk(text, taken, index))
        if not sequence.is_open and (rest := sequence.flush()):
            self._put(StreamChunk(rest, (), index))

    def _from_beam(self, sampler: Sampler, found: Hypothesis, score: float) -> GeneratedSequence:
        sequence = self._sequence_of(sampler)
        sequence.logprobs, sequence.top_logprobs = found.logprobs, found.top_logprobs
        sequence.score = score
        if found.token_ids:
            sequence.take(found.token_ids)
            sequence.flush()
        return sequence

    def _new_sequence(self, params: SamplingParams) -> GeneratedSequence:
        sampler = Sampler(
            params,
            n_tokens=self._session.n_tokens,
            eos_token_ids=self._session.eos_token_ids,
            prompt_length=len(self._request.prompt_ids),
            logits_processors=self._request.processors,
            grammar=self._session.begin_grammar(params, len(self._request.prompt_ids)),
        )
        return self._sequence_of(sampler)

    def _sequence_of(self, sampler: Sampler) -> GeneratedSequence:
        tokenizer, prompt_ids = self._session.tokenizer, self._request.prompt_ids
        return GeneratedSequence(tokenizer, prompt_ids, sampler, *self._limit)

    def stats(self) -> GenerationStats:
        """The figures so far: the recorder's, and those that the backends and the system know."""
        if self._stats is not None:
            return self._stats
        session, plan = self._session, self._session.plan
        use = session.target.stream_use
        before = self._use_before or use
        kv_bytes = sum(backend.kv_bytes for backend in session.backends)
        flops = session.model_flops
        recorded, of_all = self._recorder.stats(), session.stats
        return replace(
            recorded,
            bytes_streamed=use.bytes_streamed - before.bytes_streamed,
            stall_seconds=use.stall_seconds - before.stall_seconds,
            bytes_copied_to_device=use.bytes_copied - before.bytes_copied,
            copy_stall_seconds=use.copy_stall_seconds - before.copy_stall_seconds,
            experts_asked=use.experts_asked - before.experts_asked,
            experts_found=use.experts_found - before.experts_found,
            vram_peak_bytes=vram_peak_bytes() if plan.device == CUDA else 0,
            vram_budget_bytes=plan.vram_budget_bytes,
            peak_memory_bytes=process_memory().peak_rss_bytes,
            memory_budget_bytes=plan.budget_bytes,
            kv_bytes=kv_bytes,
            held_bytes=sum(backend.held_bytes for backend in session.backends),
            kv_used_fraction=ratio(of_all.kv_used_bytes, kv_bytes),
            kv_shared_bytes=of_all.kv_shared_bytes,
            model_flops=0 if flops is None else self._decoded_flops(flops, recorded),
            peak_flops_per_second=0.0 if flops is None else flops.peak_flops_per_second,
            is_lossless=self._request.spec.is_lossless,
            is_exact=plan.exactness.is_exact and self._request.spec.is_plain_decoding,
        )

    def _decoded_flops(self, flops: ModelFlops, recorded: GenerationStats) -> int:
        """Of all tokens but the first, which the prompt's pass brought; of beams one a position."""
        n_tokens = max(recorded.generated_tokens - 1, 0)
        n_texts = 1 if self._request.params.num_beams > 1 else len(self._sequences)
        return flops.of_tokens(n_tokens, recorded.prompt_tokens + n_tokens // (2 * n_texts))


class Continuation(TextJob):
    """One sequence of a generation, as the scheduler sees it."""

    def __init__(self, generation: Generation, sequence: GeneratedSequence, index: int) -> None:
        self._generation, self._sequence, self._index = generation, sequence, index
        self.decoder = generation.decoder(sequence)
        self.is_fresh, self.is_streamed = generation.is_fresh, generation.is_streamed

    @property
    def is_ready(self) -> bool:
        return self._generation.is_turn_of(self._index)

    def take(self) -> None:
        self._generation.take(self._sequence, self._index, self.decoder)
        self.is_complete = not self._sequence.is_open


class Beams(SearchJob):
    """A beam search of a generation, as the scheduler sees it."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._decoder: BeamDecoder | None = None
        self.is_fresh = generation.is_fresh

    @property
    def prompt_ids(self) -> Sequence[int]:
        return self._generation.prompt_ids

    def begin(self, text: TokenSequence) -> None:
        self.text, self._decoder = text, self._generation.search(text)
        self._is_started = False

    @property
    def rows(self) -> SequenceRows:
        assert self.text is not None, "it has begun"
        assert self._decoder is not None, "it has begun"
        if not self._is_started:
            return SequenceRows(self.text, self.prompt_ids[self.text.n_committed :])
        above, tokens = zip(*self._decoder.pending, strict=True)
        return SequenceRows(self.text, tokens, above)

    def run(self, most: int | None) -> None:
        decoder = self._decoder
        assert self.text is not None, "it has begun"
        assert decoder is not None, "it has begun"
        if self._is_started:
            self._generation.step_beams(decoder)
        else:
            self._is_started = self._generation.start_beams(decoder, self.text, most)
        self.is_complete = self._is_started and decoder.is_over

    def end(self) -> None:
        if self._decoder is not None:
            self._generation.take_beams(self._decoder)
