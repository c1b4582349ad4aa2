"""SequenceFactory: make the sequences of a request, their drafters and verifiers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specdec.drafters.assembly import Drafters
from specdec.drafters.base import Drafter
from specdec.engine.sequences.beam_sequence import BeamSequence, check_beams
from specdec.engine.sequences.outputs import sequence_seed
from specdec.engine.sequences.request import Request
from specdec.engine.sequences.sequence import Sequence
from specdec.grammar.state import GrammarState
from specdec.planning.run_plan import RunPlan
from specdec.policy.draft_policy import DraftPolicy
from specdec.policy.pair_statistics import PairStatistics
from specdec.sampling.context_window import ContextWindow
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import Sampler
from specdec.sampling.token_limit import token_limit
from specdec.sampling.verifier import Verifier
from specdec.text.contract import TokenDecoder
from specdec.text.stream import TextStream
from specdec.traces.recorder import TraceRecorder

_CHAIN_STREAM = 2**64 - 1
"""Second word of the Philox key for the chain rules; the match rule puts the token position there,
which never gets so large."""


@dataclass(frozen=True)
class SequenceFactory:
    """Factory of the sequences of one pair of loaded models.

    Attributes:
        num_tokens: number of tokens that both the tokenizer and the target have.
        max_context: maximum tokens of a sequence that memory was planned for.
        model_context: maximum tokens of a sequence that the model was trained for.
        max_beams: maximum beams: the tokens of a pass that memory was planned for.
        begin_grammar: (parameters, prompt length) -> grammar state of a sequence, if any.
        pair_statistics: those of earlier generations, updated by every step.
        window: part of a sequence that the target sees.
    """

    tokenizer: TokenDecoder
    num_tokens: int
    eos_token_ids: tuple[int, ...]
    max_context: int
    model_context: int
    max_beams: int
    begin_grammar: Callable[[SamplingParams, int], GrammarState | None]
    drafters: Drafters
    plan: RunPlan
    pair_statistics: PairStatistics
    trace_recorder: TraceRecorder | None = None
    window: ContextWindow = ContextWindow()

    def new_sequences(self, request: Request) -> list[Sequence]:
        """Return `params.n` sequences, or one that runs a beam search.

        Raises ConfigError if the prompt or the beams exceed the planned capacity.
        """
        params, prompt_ids = request.params, request.prompt_ids
        max_context = self.max_context
        if self.window.n_recent is not None and params.num_beams == 1:
            max_context = sys.maxsize
        limit = token_limit(params, len(prompt_ids), max_context, self.model_context)
        first = self._new_sampler(request, params)

        def new_text() -> TextStream:
            return TextStream(self.tokenizer, prompt_ids=prompt_ids, stop=params.stop)

        if params.num_beams > 1:
            check_beams(params.num_beams, request.spec, self.max_beams)
            return [BeamSequence(request, first, limit, new_text)]
        seeds = [sequence_seed(first.seed, i) for i in range(1, params.n)]
        more = [self._new_sampler(request, params.replace(seed=seed)) for seed in seeds]
        return [
            Sequence(request, sampler, limit, new_text(), index, self.window)
            for index, sampler in enumerate([first, *more])
        ]

    def _new_sampler(self, request: Request, params: SamplingParams) -> Sampler:
        num_prompt_tokens = len(request.prompt_ids)
        return Sampler(
            params,
            n_tokens=self.num_tokens,
            eos_token_ids=self.eos_token_ids,
            prompt_length=num_prompt_tokens,
            logits_processors=request.processors,
            grammar=self.begin_grammar(params, num_prompt_tokens),
        )

    def prepare(self, sequence: Sequence) -> None:
        """Give it a drafter, policy and verifier; in the engine's thread, which owns the draft."""
        if isinstance(sequence, BeamSequence):
            return
        request, sampler = sequence.request, sequence.sampler
        key = np.array([sampler.seed, _CHAIN_STREAM], dtype=np.uint64)
        rng = np.random.Generator(np.random.Philox(key=key))
        verifier = Verifier(sampler, request.spec, rng)
        if self.trace_recorder is not None:
            sequence.trace = self.trace_recorder.new_sequence()
        sequence.start(self._drafter(sequence, rng), self._policy(sequence), verifier)

    def renew(self, sequence: Sequence) -> None:
        """Give it a drafter and a policy of the models that are loaded now."""
        if isinstance(sequence, BeamSequence):
            return
        verifier = sequence.verifier
        assert verifier.rng is not None, "`prepare` has made it"
        sequence.start(self._drafter(sequence, verifier.rng), self._policy(sequence), verifier)

    def _drafter(self, sequence: Sequence, rng: np.random.Generator) -> Drafter:
        """Return the sequence's drafter; rng: draws for the chain rules."""
        request = sequence.request
        if request.drafter is None:
            return self.drafters.for_sequence(sequence.sampler, request.spec, rng)
        request.drafter.reset()
        return request.drafter

    def _policy(self, sequence: Sequence) -> DraftPolicy:
        return DraftPolicy(
            sequence.request.spec,
            self.pair_statistics,
            self.max_context,
            temperature=sequence.sampler.params.temperature,
        )
