"""Steps of one sequence on tiny models, without tokenizer, plan or engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import numpy as np
from alone import own

from backends.contract.backend import Backend
from specdec.config import SpecConfig
from specdec.drafters.assembly import NoDrafter
from specdec.drafters.base import Drafter, TreeLimits
from specdec.engine.draft_worker import DraftWorker
from specdec.engine.scheduler import Batch, PrefillChunk
from specdec.engine.sequences.request import Request
from specdec.engine.sequences.sequence import Sequence as EngineSequence
from specdec.engine.sequences.sequence import VerifiedTree
from specdec.engine.speculation import Speculation
from specdec.grammar.state import GrammarState
from specdec.metrics.recorder import StatsRecorder, Totals
from specdec.policy.cost_model import CostModel
from specdec.policy.draft_policy import DraftPolicy
from specdec.policy.pair_statistics import PairStatistics
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import Sampler
from specdec.sampling.token_limit import TokenLimit
from specdec.sampling.verifier import Verifier
from specdec.verification.acceptance import Acceptance
from specdec.verification.tree import ROOT, DraftTree

FREE = CostModel(read_seconds=1.0, fixed_seconds=0.0, seconds_per_token=0.01)


class RandomDrafter(Drafter):
    """A drafter of random trees of random tokens, a new one every step."""

    def __init__(self, vocab: int, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._vocab = vocab

    def propose(self, context_ids: Sequence[int], limits: TreeLimits) -> DraftTree:
        tree = DraftTree(context_ids[-1])
        for _ in range(int(self._rng.integers(0, limits.max_nodes + 1))):
            parent = int(self._rng.integers(0, len(tree)))
            if tree.depths[parent] < limits.max_depth:
                tree.add(parent, int(self._rng.integers(0, self._vocab)), -1.0)
        return tree


class ScriptedDrafter(Drafter):
    """A drafter of the known continuation, wrong from the `wrong_at`-th token of each step on."""

    def __init__(self, script: Sequence[int], vocab: int, wrong_at: int | None = None) -> None:
        self._script, self._vocab, self._wrong_at = list(script), vocab, wrong_at
        self.accepted: list[int] = []

    def propose(self, context_ids: Sequence[int], limits: TreeLimits) -> DraftTree:
        tree, node = DraftTree(context_ids[-1]), ROOT
        ahead = self._script[len(context_ids) :]
        for i, token in enumerate(ahead[: min(limits.max_depth, limits.max_nodes)]):
            wrong = self._wrong_at is not None and i >= self._wrong_at
            node = tree.add(node, (token + 1) % self._vocab if wrong else token, -0.1)
        return tree

    def observe(self, acceptance: Acceptance, tree: DraftTree) -> None:
        self.accepted.append(acceptance.n_accepted)


class SteppedAhead(DraftWorker):
    """Parallel drafting in the caller's thread, with a given number of levels beside each pass."""

    def __init__(self, n_levels: Iterable[int]) -> None:
        super().__init__()
        self._n_levels = iter(n_levels)

    def draft_during(self, run_pass: Any, cancel_pass: Any, draft: Any, cancel_draft: Any) -> Any:
        n_levels, n_asked = next(self._n_levels), count()
        draft(lambda: next(n_asked) >= n_levels)
        return run_pass()


class NeverAhead(DraftWorker):
    """A worker that drafts nothing while passes run."""

    def draft_during(self, run_pass: Any, cancel_pass: Any, draft: Any, cancel_draft: Any) -> Any:
        return run_pass()


def speculation_of(target: Backend, worker: DraftWorker | None = None) -> Speculation:
    return Speculation(
        target,
        None,
        worker or NeverAhead(),
        max_draft_tokens=None,
        max_nodes=2**20,
        totals=Totals(),
    )


class LoneSequence:
    """A sequence and the steps that decode it, alone, on the target's own KV."""

    def __init__(
        self,
        target: Backend,
        drafter: Drafter,
        sampler: Sampler,
        spec: SpecConfig,
        recorder: StatsRecorder | None = None,
        ahead: DraftWorker | None = None,
        rng: Any = None,
    ) -> None:
        self._target, self._speculation = target, speculation_of(target, ahead)
        self._recorder = recorder or StatsRecorder()
        self._sampler, self._spec = sampler, spec
        policy = DraftPolicy(spec, PairStatistics(FREE, None, 99), target.max_context)
        self._parts = drafter, policy, Verifier(sampler, spec, rng)

    @property
    def context(self) -> list[int]:
        return self.sequence.token_ids

    def start(self, prompt: Sequence[int]) -> int:
        request = Request(prompt, self._sampler.params, self._spec)
        request.recorder = self._recorder
        sequence = EngineSequence(request, self._sampler, TokenLimit(2**30, None))
        self.sequence = sequence
        sequence.start(*self._parts)
        kv = own(self._target)
        kv.cut_to(prompt)
        sequence.attach(kv)
        chunk = PrefillChunk(sequence, sequence.prefill_chunk(len(prompt)))
        scores = self._speculation.forward([], Batch(prefill=[chunk]))
        sequence.end_prefill(scores.prefill[0])
        self._check()
        return sequence.token_ids[-1]

    def step(self, max_tokens: int) -> VerifiedTree:
        sequence, batch = self.sequence, Batch(decode=[self.sequence])
        sequence._limit = TokenLimit(sequence.num_new_tokens + max_tokens, None)
        trees = self._speculation.propose(batch)
        self._check()
        scores = self._speculation.forward(trees, batch)
        verified = sequence.accept(trees[0][1], scores.trees[0])
        self._check()
        assert verified is not None
        self._speculation.observe([(sequence, verified)])
        return verified

    def _check(self) -> None:
        if self.sequence.request.error is not None:
            raise self.sequence.request.error


def make_controller(
    target: Backend,
    drafter: Drafter | None = None,
    params: SamplingParams | None = None,
    *,
    spec: SpecConfig | None = None,
    prompt_length: int = 0,
    eos: Sequence[int] = (),
    grammar: GrammarState | None = None,
    **options: Any,
) -> LoneSequence:
    sampler = Sampler(
        params or SamplingParams(),
        n_tokens=target.vocab_size,
        eos_token_ids=eos,
        prompt_length=prompt_length,
        grammar=grammar,
    )
    spec = spec or SpecConfig(num_draft_tokens=12, draft_depth=6)
    return LoneSequence(target, drafter or NoDrafter(), sampler, spec, **options)


def limits_after(context_ids: Sequence[int], spec: SpecConfig) -> TreeLimits:
    """Return the limits of the next proposal of such a controller, with the tree size of `spec`."""
    return DraftPolicy(spec, PairStatistics(FREE, None, 99), 256).limits(len(context_ids), 99, 256)


def run(
    target: Backend,
    prompt: Sequence[int],
    n: int,
    drafter: Drafter | None = None,
    params: SamplingParams | None = None,
    eos: Sequence[int] = (),
    **options: object,
) -> list[int]:
    """Return `n` new tokens after the prompt, fewer if a stop token comes."""
    own(target).rollback(0)
    if drafter is not None:
        drafter.reset()
    params = params or SamplingParams()
    stops = params.resolve_stop_tokens(tuple(eos))
    controller = make_controller(
        target, drafter, params, prompt_length=len(prompt), eos=eos, **options
    )
    tokens = [controller.start(prompt)]
    while len(tokens) < n and tokens[-1] not in stops:
        tokens += controller.step(n - len(tokens)).token_ids
        assert len(tokens) <= n
        assert own(target).n_committed == len(prompt) + len(tokens) - 1
    return tokens
