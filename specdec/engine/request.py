"""Request: a prompt and parameters, the sequences that continue it, and a queue of chunks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import count
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from backends.contract.backend import StreamUse
from specdec.config import SpecConfig
from specdec.drafters.base import Drafter
from specdec.engine.beam_sequence import BeamSequence, check_beams
from specdec.engine.outputs import CompletionOutput, StreamChunk, sequence_seed
from specdec.engine.request_stats import stats_of
from specdec.engine.sequence import Sequence as TokenSequence
from specdec.engine.token_limit import token_limit
from specdec.metrics.recorder import StatsRecorder
from specdec.metrics.stats import GenerationStats
from specdec.policy.draft_policy import DraftPolicy
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import Sampler
from specdec.text.stream import TextStream
from specdec.verification.verifier import Verifier

if TYPE_CHECKING:
    from specdec.engine.session import Session

_CHAIN_STREAM = 2**64 - 1
"""Key word of the chain rules' random numbers; positions, the match rule's, never get there."""


class Request:
    """One generation, as a caller asked for it; the engine runs its sequences.

    Args:
        processors: a caller's own logits processors.
        cache_prompt: whether KV of other sequences may be used.
        priority: larger ones are scheduled first.
        drafter: a caller's own, in place of those that `spec` names.

    Attributes:
        sequences: `params.n` of them, or one that runs a beam search.
        output: chunks, and None at the end.
        on_output: called by the engine's thread when there is something in `output`.
        is_streamed: somebody reads the chunks as they come, so that gaps are noticed.
        is_cancelled: nobody wants any more of it; any thread may set it.

    Raises ConfigError where the session has no capacity for what is asked for.
    """

    def __init__(
        self,
        session: Session,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        spec: SpecConfig,
        *,
        processors: Sequence[Any] = (),
        cache_prompt: bool = True,
        priority: int = 0,
        drafter: Drafter | None = None,
    ) -> None:
        self.session, self.prompt_ids = session, prompt_ids
        self.params, self.spec = params, spec
        self._processors = processors
        self.cache_prompt, self.priority, self.drafter = cache_prompt, priority, drafter
        self.is_streamed, self.is_cancelled = True, False
        self.use_before: StreamUse | None = None
        """Bytes and stalls of the session when the request began."""
        self._num_starts = count()  # its `next` is atomic
        self._error: BaseException | None = None
        self._stats: GenerationStats | None = None
        self._finished = threading.Event()
        self.output: SimpleQueue[StreamChunk | None] = SimpleQueue()
        self.on_output: Callable[[], None] = lambda: None
        self.recorder = StatsRecorder(len(prompt_ids))
        self._limit = token_limit(
            params, len(prompt_ids), session.target.max_context, session.model_context
        )
        self.sequences = self._new_sequences()

    # --- its sequences -------------------------------------------------------------------------

    def _new_sequences(self) -> list[TokenSequence]:
        params, first = self.params, self._new_sampler(self.params)
        if params.num_beams > 1:
            check_beams(params.num_beams, self.spec, self.session.max_beams)
            return [BeamSequence(self, first, self._limit, self._new_text)]
        seeds = [sequence_seed(first.seed, i) for i in range(1, params.n)]
        samplers = [first, *(self._new_sampler(params.replace(seed=seed)) for seed in seeds)]
        return [
            TokenSequence(self, sampler, self._limit, self._new_text(), index)
            for index, sampler in enumerate(samplers)
        ]

    def _new_sampler(self, params: SamplingParams) -> Sampler:
        session = self.session
        return Sampler(
            params,
            n_tokens=session.n_tokens,
            eos_token_ids=session.eos_token_ids,
            prompt_length=len(self.prompt_ids),
            logits_processors=self._processors,
            grammar=session.begin_grammar(params, len(self.prompt_ids)),
        )

    def _new_text(self) -> TextStream:
        return TextStream(self.session.tokenizer, prompt_ids=self.prompt_ids, stop=self.params.stop)

    def begin(self) -> None:
        """Give the sequences what they draft and verify with; in the engine's thread."""
        for sequence in self.sequences:
            if not isinstance(sequence, BeamSequence):
                self._begin_sequence(sequence)

    def _begin_sequence(self, sequence: TokenSequence) -> None:
        session, sampler, spec = self.session, sequence.sampler, self.spec
        key = np.array([sampler.seed, _CHAIN_STREAM], dtype=np.uint64)
        rng = np.random.Generator(np.random.Philox(key=key))
        drafter = self.drafter
        if drafter is None:
            drafter = session.drafters.of_text(sampler, spec, rng)
        else:
            drafter.reset()
        policy = DraftPolicy(
            spec,
            session.plan.pass_cost,
            session.target.max_context,
            session.plan.draft_cost,
            session.plan.n_draft_tokens,
            experience=session.experience,
            temperature=sampler.params.temperature,
        )
        sequence.begin(drafter, policy, Verifier(sampler, spec, rng))

    # --- its life ------------------------------------------------------------------------------

    def start(self) -> None:
        """Hand it to the engine, once.

        Its clocks begin here, with the first chunk asked for, not when it was made.
        """
        if next(self._num_starts) == 0:
            session = self.session
            self.use_before = session.target.stream_use
            self.recorder = StatsRecorder(len(self.prompt_ids), totals=session.totals)
            session.engine.add(self)

    def put(self, chunk: StreamChunk | None) -> None:
        self.output.put(chunk)
        self.on_output()

    @property
    def is_aborted(self) -> bool:
        """Whether all of its sequences end, at whatever point they are."""
        return self.is_cancelled or any(one.error is not None for one in self.sequences)

    @property
    def has_ended(self) -> bool:
        """Whether none of its sequences goes on."""
        return all(one.is_finished for one in self.sequences)

    @property
    def is_finished(self) -> bool:
        """Whether nothing more is computed; chunks may be left."""
        return self._finished.is_set()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until it has finished; whether it has."""
        return self._finished.wait(timeout_seconds)

    def finish(self, error: BaseException | None = None) -> None:
        """Let nobody wait for it any more. Idempotent.

        error: what ended it, where that is not a sequence's own.
        """
        if self.is_finished:
            return
        try:
            own = (one.error for one in self.sequences if one.error is not None)
            self._error = next(own, error)
            for sequence in self.sequences:
                sequence.finish()
            if self._error is None and not self.is_cancelled:
                self.session.check_figures(self.recorder.stats().pass_times)
            self._stats = self.stats()
        finally:
            self._finished.set()
            self.put(None)

    def take_error(self) -> BaseException | None:
        """Return what ended it, once."""
        error, self._error = self._error, None
        return None if self.is_cancelled else error

    @property
    def outputs(self) -> tuple[CompletionOutput, ...]:
        """The sequences so far."""
        return tuple(output for sequence in self.sequences for output in sequence.outputs)

    def stats(self) -> GenerationStats:
        """The figures so far."""
        return self._stats if self._stats is not None else stats_of(self)
