"""The loop: propose, verify, accept, commit. Everything else serves these few lines of `step`.

The context ends with one *pending* token: emitted, its KV not yet computed. It is the root of the
next tree, so a pass always scores at least one token, and plain decoding is the same loop with a
drafter that proposes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from backends.contract.backend import Backend
from specdec.config import SpecConfig
from specdec.decoding.ahead_thread import AheadThread
from specdec.decoding.recorder import StatsRecorder
from specdec.drafters.base import Drafter, TreeLimits
from specdec.policy.draft_policy import DraftPolicy
from specdec.sampling.logprobs import TopLogprobs, logprobs_of_token
from specdec.sampling.sampler import Sampler
from specdec.verification.acceptance import Acceptance, lenient, match_walk, rejection_walk
from specdec.verification.block import block_walk
from specdec.verification.tree import DraftTree

ChainRule = Callable[..., Acceptance]
_CHAIN_RULES: dict[str, ChainRule] = {"rejection": rejection_walk, "block": block_walk}


class Round(NamedTuple):
    """What one step did."""

    tree: DraftTree
    acceptance: Acceptance
    tokens: tuple[int, ...]


class NoDrafter(Drafter):
    """Proposes nothing: plain decoding."""

    def propose(self, context_ids: Sequence[int], limits: TreeLimits) -> DraftTree:
        return DraftTree(context_ids[-1])


class Controller:
    """Generates tokens with one target, one drafter and one rule of acceptance.

    Args:
        target: the model whose output is wanted; KV in its cache that the prompt begins with is
            used.
        drafter: guesses; it never sees the target's logits.
        sampler: the target's choice of a token from a row of logits.
        policy: how large a tree to ask for.
        spec: the rule of acceptance.
        recorder: collects the statistics.
        ahead: drafts while passes run, where the policy wants it; without it nothing does.
        rng: decides for the rules of chains; the match rule needs none.

    Attributes:
        context: prompt and emitted tokens; the last one is pending.
        logprobs, top_logprobs: of every emitted token, before any processor, as far as the
            sampler's parameters ask for them.
        prompt_row: the target's, float32 [vocab], for further sequences of the same prompt.
    """

    def __init__(
        self,
        target: Backend,
        drafter: Drafter,
        sampler: Sampler,
        policy: DraftPolicy,
        spec: SpecConfig,
        *,
        recorder: StatsRecorder,
        ahead: AheadThread | None = None,
        rng: np.random.Generator | None = None,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._sampler = sampler
        self._policy = policy
        self._rule = (
            self._match
            if spec.acceptance == "match"
            else partial(self._decide, _CHAIN_RULES[spec.acceptance])
        )
        self._accept_threshold = spec.accept_threshold
        self._recorder = recorder
        self._ahead = ahead
        self._rng = rng
        self.context: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[TopLogprobs] = []
        self.prompt_row: NDArray[np.float32] | None = None

    def start(
        self, prompt_ids: Sequence[int], prompt_row: NDArray[np.float32] | None = None
    ) -> int:
        """Run the prompt; return the first token, which is pending from now on.

        prompt_row: of the same prompt, whose KV the target still has: then nothing is computed.
        """
        self.context = list(prompt_ids)
        n_reused = len(self.context)
        if prompt_row is None:
            n_reused, prompt_row = self._target.prefill_from(self.context)
        else:
            self._target.rollback(n_reused)
        self.prompt_row = prompt_row
        token = self._sampler.choose(self.context, prompt_row, position=len(self.context))
        self._note_logprobs([prompt_row], [token])
        self.context.append(token)
        self._recorder.record_first_token(n_reused)
        return token

    def step(self, max_tokens: int) -> Round:
        """One round: between 1 and `max_tokens` new tokens."""
        with self._recorder.drafting():
            room = self._target.node_room
            limits = self._policy.limits(len(self.context), max_tokens, room)
            tree = self._policy.trim(self._drafter.propose(self.context, limits))
        node_ids, logits = self._verify(tree)
        acceptance = self._rule(tree, logits, max_tokens)
        self._target.commit([node_ids[i] for i in acceptance.path])
        with self._recorder.drafting():
            self._drafter.observe(acceptance, tree)
        self._recorder.record_outcome(was_ahead=self._drafter.is_ready)
        self._policy.observe(acceptance, tree)
        tokens = acceptance.emitted(tree)
        self._note_logprobs((logits[i] for i in acceptance.path), tokens)
        self.context.extend(tokens)
        return Round(tree, acceptance, tokens)

    def _verify(self, tree: DraftTree) -> tuple[list[int], NDArray[np.float32]]:
        """One pass over the tree; where it pays, the drafter prepares the next tree beside it."""
        ahead = self._ahead
        if ahead is None or not self._drafter.can_draft_ahead:
            return self._pass(tree)
        if not self._policy.should_draft_ahead():
            return self._pass(tree)

        def draft(should_stop: Callable[[], bool]) -> None:
            with self._recorder.drafting_ahead():
                self._drafter.draft_ahead(tree, should_stop)

        return ahead.beside(
            lambda: self._pass(tree, is_drafting_ahead=True),
            self._target.request_cancel,
            draft,
            self._drafter.request_cancel,
        )

    def _pass(
        self, tree: DraftTree, *, is_drafting_ahead: bool = False
    ) -> tuple[list[int], NDArray[np.float32]]:
        with self._recorder.verifying(len(tree), is_drafting_ahead=is_drafting_ahead):
            return self._target.extend(tree.token_ids, self._target_parents(tree))

    def _target_parents(self, tree: DraftTree) -> list[int]:
        """The tree's parents as ids that the target will give its nodes; the root's is PREFIX."""
        first = self._target.next_node_id
        return [parent if parent < 0 else first + parent for parent in tree.parents]

    def _match(self, tree: DraftTree, logits: NDArray[np.float32], max_tokens: int) -> Acceptance:
        choose = self._sampler.chooser(lambda node: self._prefix(tree, node), logits.__getitem__)
        if self._accept_threshold is not None:

            def target_probs(node: int) -> NDArray[np.float64]:
                row = logits[node]
                return np.exp(self._sampler.log_probs(self._prefix(tree, node), row))

            choose = lenient(tree, choose, target_probs, self._accept_threshold)
        return match_walk(tree, choose, max_tokens, self._sampler.stop_tokens)

    def _decide(
        self, walk: ChainRule, tree: DraftTree, logits: NDArray[np.float32], max_tokens: int
    ) -> Acceptance:
        assert self._rng is not None, "the rules of chains decide at random"

        def target_probs(node: int) -> NDArray[np.float64]:
            return self._sampler.probs(self._prefix(tree, node), logits[node])

        return walk(tree, target_probs, self._rng, max_tokens, self._sampler.stop_tokens)

    def _prefix(self, tree: DraftTree, node: int) -> list[int]:
        """All tokens up to and including `node`: what the target's row `node` continues."""
        return [*self.context, *tree.tokens_on_path(node)]

    def _note_logprobs(self, rows: Iterable[NDArray[np.float32]], tokens: Sequence[int]) -> None:
        params = self._sampler.params
        if not params.logprobs:
            return  # rows may lie on a device: none is brought for nothing
        for row, token in zip(rows, tokens, strict=True):
            real = row[: self._sampler.n_tokens]
            logprob, top = logprobs_of_token(real, token, params.n_top_logprobs)
            self.logprobs.append(logprob)
            self.top_logprobs.append(top)
