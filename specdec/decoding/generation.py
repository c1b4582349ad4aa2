"""One generation: what a caller asked for becomes chunks of text, and figures of how."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.contract.backend import StreamUse
from offload.process.memory import process_memory
from specdec.analysis.utilization import ModelFlops
from specdec.checks import ConfigError
from specdec.config import SpecConfig
from specdec.decoding.beams import BeamDecoder, Hypothesis, check_beams
from specdec.decoding.recorder import StatsRecorder
from specdec.decoding.sequences import (
    CompletionOutput,
    GeneratedSequence,
    StreamChunk,
    sequence_seed,
)
from specdec.decoding.session import Session
from specdec.decoding.stats import GenerationStats
from specdec.drafters.base import Drafter
from specdec.planning.gpu import vram_peak_bytes
from specdec.planning.run_options import CUDA
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
    drafter: Drafter | None = None


class Generation:
    """The sequences that continue one prompt.

    Raises ConfigError where the session has no room for what is asked for.
    """

    def __init__(self, session: Session, request: Request) -> None:
        self._session, self._request = session, request
        params = request.params
        self._limit = _token_limit(params, len(request.prompt_ids), session.target.max_context)
        self._recorder = StatsRecorder(len(request.prompt_ids))
        self._sequences = [self._new_sequence(params)]
        if params.num_beams > 1:
            check_beams(params.num_beams, request.spec, session.max_beams)
        self._use_before: StreamUse | None = None  # of bytes and stalls, when this one began

    @property
    def outputs(self) -> tuple[CompletionOutput, ...]:
        """The sequences so far."""
        return tuple(sequence.output for sequence in self._sequences)

    def chunks(self, check: Callable[[], None]) -> Generator[StreamChunk, None, None]:
        """Compute and yield; nothing else may use the session's models meanwhile.

        check: called before each pass; what it raises ends the generation.
        """
        if not self._request.cache_prompt:
            self._session.forget_prompt()
        self._use_before = self._session.target.stream_use
        # The request begins with the first chunk asked for, not when the stream was made.
        self._recorder = StatsRecorder(len(self._request.prompt_ids))
        if self._request.params.num_beams > 1:
            yield from self._search(check)
        else:
            yield from self._sample(check)
            self._session.check_figures(self._recorder.stats().pass_times)

    def _sample(self, check: Callable[[], None]) -> Generator[StreamChunk, None, None]:
        """Sequence after sequence; all but the first take up the prompt's KV and its row."""
        params = self._request.params
        seed = self._sequences[0].sampler.seed
        prompt_row: NDArray[np.float32] | None = None
        for index in range(params.n):
            if index > 0:
                own = params.replace(seed=sequence_seed(seed, index))
                self._sequences.append(self._new_sequence(own))
            sequence = self._sequences[index]
            controller = self._session.controller(
                sequence.sampler, self._request.spec, self._recorder, self._request.drafter
            )
            sequence.logprobs, sequence.top_logprobs = controller.logprobs, controller.top_logprobs
            spare = self._session.spare
            if prompt_row is None:
                spare.give_back()
            first = controller.start(self._request.prompt_ids, prompt_row)
            spare.begin()
            prompt_row = controller.prompt_row
            yield StreamChunk(*sequence.take((first,)), index)
            while sequence.is_open:
                check()
                tree, acceptance, tokens = controller.step(sequence.n_left)
                spare.lend(len(tree), len(controller.context))
                text, taken = sequence.take(tokens)
                self._recorder.record_round(tree, acceptance, n_emitted=len(taken))
                yield StreamChunk(text, taken, index)
            rest = sequence.flush()
            if rest:
                yield StreamChunk(rest, (), index)

    def _search(self, check: Callable[[], None]) -> Generator[StreamChunk, None, None]:
        """Beam search: what its sequences are is known at the end only."""
        request, sampler = self._request, self._sequences[0].sampler
        stops, prompt_ids = None, request.prompt_ids
        if request.params.stop:
            tokenizer = self._session.tokenizer
            stops = TextStream(tokenizer, prompt_ids=prompt_ids, stop=request.params.stop)
        self._session.spare.give_back()
        decoder = BeamDecoder(self._session.target, sampler, prompt_ids, self._limit, stops)
        try:
            decoder.start()
            self._recorder.record_first_token(decoder.n_reused)
            while not decoder.is_over:
                check()
                with self._recorder.verifying():
                    decoder.step()
                self._recorder.record_round(*_ONE_TOKEN)
        finally:
            found = decoder.results(request.params.n)
            self._sequences = [self._from_beam(sampler, one, score) for one, score in found]
        for index, output in enumerate(self.outputs):
            yield StreamChunk(output.text, output.token_ids, index)

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
        return GeneratedSequence(
            self._session.tokenizer, self._request.prompt_ids, sampler, self._limit
        )

    def stats(self) -> GenerationStats:
        """The figures so far: the recorder's, and those that the backends and the system know."""
        session, plan = self._session, self._session.plan
        use = session.target.stream_use
        before = self._use_before or use
        kv_bytes = sum(backend.kv_bytes for backend in session.backends)
        used = sum(b.kv_bytes * b.n_committed / max(1, b.n_kv_allocated) for b in session.backends)
        flops = session.model_flops
        recorded = self._recorder.stats()
        return replace(
            recorded,
            bytes_streamed=use.bytes_streamed - before.bytes_streamed,
            stall_seconds=use.stall_seconds - before.stall_seconds,
            bytes_copied_to_device=use.bytes_copied - before.bytes_copied,
            copy_stall_seconds=use.copy_stall_seconds - before.copy_stall_seconds,
            vram_peak_bytes=vram_peak_bytes() if plan.device == CUDA else 0,
            vram_budget_bytes=plan.vram_budget_bytes,
            peak_memory_bytes=process_memory().peak_rss_bytes,
            memory_budget_bytes=plan.budget_bytes,
            kv_bytes=kv_bytes,
            held_bytes=sum(backend.held_bytes for backend in session.backends),
            kv_used_fraction=used / kv_bytes if kv_bytes else 0.0,
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


def _token_limit(params: SamplingParams, n_prompt: int, max_context: int) -> int:
    """New tokens at most; like transformers, no limit that the prompt alone reaches."""
    limit = params.token_limit(n_prompt)
    if limit < 1:
        raise ConfigError(
            f"max_length is {params.max_length}, but the prompt alone has {n_prompt} tokens: "
            "raise it, or set max_tokens"
        )
    return min(limit, max_context - n_prompt)
