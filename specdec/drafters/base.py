"""Drafter: the interface of everything that guesses the target's next tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backends.contract.sequence import SequenceKV
from specdec.drafters.batched_drafting import DraftSteps
from specdec.verification.acceptance import Acceptance
from specdec.verification.tree import DraftTree


@dataclass(frozen=True)
class TreeLimits:
    """Maximum size of a proposed tree."""

    max_nodes: int  # draft tokens; the root is not counted
    max_depth: int
    width: int  # children of one node; 1 requests a chain
    min_level_probability: float = 0.0
    """Minimum total path probability of a level to be run, of nodes that are not `known`."""
    max_ahead_depth: int = 0
    """Maximum depth of parallel drafting from the same root: the next tree grows below this one."""
    known: DraftTree | None = None
    """The proposals of other drafters for the same context, as one tree."""

    def __post_init__(self) -> None:
        if min(self.max_nodes, self.max_depth, self.max_ahead_depth) < 0 or self.width < 1:
            raise ValueError(f"limits of a tree must not be negative, nor its width 0: {self}")


class Drafter(ABC):
    """Source of draft trees; learns from what the target accepts.

    A drafter never sees the target's logits or choices of the step it drafts for, so that any tree
    is lossless. A draft tree without nodes below the root is a valid proposal.
    """

    @abstractmethod
    def propose(self, context_ids: Sequence[int], limits: TreeLimits) -> DraftTree:
        """Return a tree of candidates that may follow the context.

        Args:
            context_ids: prompt and emitted tokens; the last one is the pending token, which
                becomes the tree's root.
            limits: bounds of the tree.
        """

    def propose_in_steps(
        self, context_ids: Sequence[int], limits: TreeLimits
    ) -> DraftSteps[DraftTree]:
        """Propose in steps, for a drafter that runs a model: several sequences share its passes
        (specdec.drafters.batched_drafting)."""
        return self.propose(context_ids, limits)
        yield  # makes this a generator

    def prefill_in_steps(self, context_ids: Sequence[int], limit: int) -> DraftSteps[None]:
        """Prefill the next `limit` tokens of a context, in steps, beside other sequences' decoding:
        all at once they would delay the first step that drafts."""
        yield from ()

    def num_uncomputed(self, context_ids: Sequence[int]) -> int:
        """Return the maximum tokens of the context that a draft model must compute before it can
        draft; 0 without a model."""
        return 0

    @property
    def can_draft_ahead(self) -> bool:
        """Whether `drafting_ahead` has anything to do after the last proposal."""
        return False

    def drafting_ahead(self, tree: DraftTree) -> DraftSteps[None]:
        """Prepare the next proposal, in steps, while the target verifies `tree`.

        Runs in another thread than the other methods, but never at the same time. It may be
        stopped after any step, once the pass is over.
        """
        yield from ()

    def observe(self, acceptance: Acceptance, tree: DraftTree) -> None:  # noqa: B027 (optional)
        """Learn from a step: its outcome, and the tree that was verified.

        `tree` may have nodes of other drafters and lack some of this one's: compare with the tokens
        `acceptance.emitted(tree)`.
        """

    @property
    def max_hidden_states(self) -> int:
        """Maximum last tokens of a prompt whose hidden states `take_hidden_states` is to be given;
        0 for a drafter that uses none."""
        return 0

    def take_hidden_states(self, position: int, states: NDArray[np.float32]) -> None:  # noqa: B027
        """Take the target's hidden states [n, width] of the context's tokens from `position` on,
        once they are certain."""

    def take_kv(self, kv: SequenceKV) -> None:  # noqa: B027
        """Take the target's KV of the context, after `take_hidden_states`, for a head that attends
        to it. It is only read, between the target's passes, until the next `reset`."""

    @property
    def is_ready(self) -> bool:
        """Whether the last observed outcome was among those prepared by drafting ahead."""
        return False

    def reset(self) -> None:  # noqa: B027 (optional)
        """Forget the context and release its KV: the sequence has ended or was interrupted. The
        next proposal may be for another one."""
