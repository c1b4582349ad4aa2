"""Drafting: the drafter of one sequence, whose errors end its request alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from backends.contract.sequence import SequenceKV
from specdec.drafters.base import Drafter
from specdec.drafters.batched_drafting import DraftSteps
from specdec.drafters.proposal import check_proposal
from specdec.engine.sequences.request import Request, own_errors
from specdec.policy.draft_policy import DraftPolicy
from specdec.verification.acceptance import Acceptance
from specdec.verification.tree import DraftTree

T = TypeVar("T")


class Drafting:
    """Drafter of one sequence, with the policy that sizes its trees.

    The drafter may be a caller's own: what it raises fails the request, here and nowhere else. A
    method then returns as if there were nothing to draft.

    Args:
        vocab_size: number of tokens that may be proposed.
    """

    def __init__(
        self, request: Request, drafter: Drafter, policy: DraftPolicy, vocab_size: int
    ) -> None:
        self.request, self.policy = request, policy
        self._drafter, self._vocab_size = drafter, vocab_size

    @property
    def max_hidden_states(self) -> int:
        """See Drafter.max_hidden_states."""
        num_states = 0
        with own_errors(self.request):
            num_states += self._drafter.max_hidden_states
        return num_states

    def num_uncomputed(self, token_ids: Sequence[int]) -> int:
        """Return the maximum tokens that the draft model must compute before it can draft."""
        num_tokens = 0
        with own_errors(self.request):
            num_tokens += self._drafter.num_uncomputed(token_ids)
        return num_tokens

    @property
    def can_draft_ahead(self) -> bool:
        can_draft = False
        with own_errors(self.request):
            can_draft = self._drafter.can_draft_ahead
        return can_draft

    def prefill(self, token_ids: Sequence[int], max_tokens: int, num_seqs: int) -> DraftSteps[None]:
        """Compute the draft's KV of a prefill chunk, beside `num_seqs` decoding sequences."""
        if self.policy.uses_draft(num_seqs):
            yield from self._own_steps(
                lambda: self._drafter.prefill_in_steps(token_ids, max_tokens)
            )

    def propose(
        self,
        token_ids: Sequence[int],
        kv: SequenceKV,
        *,
        num_context_tokens: int,
        max_tokens: int,
        max_nodes: int,
        num_seqs: int,
    ) -> DraftSteps[DraftTree]:
        """Return the draft tree of the next step.

        kv: that of the target. num_context_tokens: tokens that the target sees, the pending one
        included. max_tokens: maximum tokens that the step may emit.
        num_seqs: number of sequences that share the step and its `max_nodes` draft tokens.
        """
        pending_id = token_ids[-1]
        limit = max_nodes // num_seqs if self.policy.is_whole else max_nodes
        limit = min(kv.num_free_slots, 1 + limit)
        limits = self.policy.limits(num_context_tokens, max_tokens, limit, num_seqs)
        tree = yield from self._own_steps(lambda: self._drafter.propose_in_steps(token_ids, limits))
        with own_errors(self.request):
            check_proposal(
                tree,
                pending_id,
                max_nodes=limit,
                max_depth=self.policy.max_context - num_context_tokens,
                vocab_size=self._vocab_size,
            )
        if tree is None or self.request.error is not None:
            return DraftTree(pending_id)
        return tree

    def draft_ahead(self, tree: DraftTree) -> DraftSteps[None]:
        """Prepare the next proposal while the target verifies `tree`."""
        return self._own_steps(lambda: self._drafter.drafting_ahead(tree))

    def _own_steps(self, begin: Callable[[], DraftSteps[T]]) -> DraftSteps[T | None]:
        """Run the drafter's generator; its result is None after an error."""
        try:
            return (yield from begin())
        except GeneratorExit:  # the steps are closed
            raise
        except BaseException as error:
            self.request.fail(error)
            return None

    def observe(
        self,
        acceptance: Acceptance,
        tree: DraftTree,
        states: NDArray[np.float32],
        kv: SequenceKV,
        num_hidden: int,
    ) -> None:
        """Let the drafter learn from a step, whose path is committed.

        states: the target's hidden states of the tree's nodes, if they were asked for.
        num_hidden: tokens that the window of the target leaves out.
        """
        recorder = self.request.recorder
        with own_errors(self.request):
            with recorder.drafting():
                self._drafter.observe(acceptance, tree)
                if len(states):
                    self.take_hidden_states(states[list(acceptance.path)], kv, num_hidden)
            recorder.record_outcome(was_ahead=self._drafter.is_ready)

    def take_hidden_states(
        self, states: NDArray[np.float32], kv: SequenceKV, num_hidden: int
    ) -> None:
        """Give the drafter the target's hidden states of the last committed tokens."""
        if len(states):
            with own_errors(self.request):
                position = num_hidden + kv.n_committed - len(states)
                self._drafter.take_hidden_states(position, states)
                self._drafter.take_kv(kv)

    def reset(self) -> None:
        """Let the drafter forget the context."""
        with own_errors(self.request):
            self._drafter.reset()
