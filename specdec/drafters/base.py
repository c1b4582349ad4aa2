"""The contract of everything that guesses the target's next tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.drafters.batched_drafting import DraftSteps
from specdec.verification.acceptance import Acceptance
from specdec.verification.tree import DraftTree


@dataclass(frozen=True)
class TreeLimits:
    """How large a proposal may be."""

    max_nodes: int  # drafted nodes; the root is not counted
    max_depth: int
    width: int  # children of one node; 1 asks for a chain
    min_level_probability: float = 0.0
    """A new level whose nodes have a smaller path probability in total is not run."""
    max_ahead_depth: int = 0
    """Levels, from the same root, that drafting ahead may reach: the next tree hangs below this."""

    def __post_init__(self) -> None:
        if min(self.max_nodes, self.max_depth, self.max_ahead_depth) < 0 or self.width < 1:
            raise ValueError(f"limits of a tree must not be negative, nor its width 0: {self}")


class Drafter(ABC):
    """Proposes trees of candidate tokens, and learns from what the target accepts.

    A drafter never sees the target's logits or choices of the step it drafts for: that is what
    makes any tree lossless. A draft tree without nodes below the root is a valid proposal.
    """

    @abstractmethod
    def propose(self, context_ids: Sequence[int], limits: TreeLimits) -> DraftTree:
        """Candidates that may follow the context.

        Args:
            context_ids: prompt and emitted tokens; the last one is the pending token, which
                becomes the tree's root.
            limits: bounds of the tree.
        """

    def proposing(self, context_ids: Sequence[int], limits: TreeLimits) -> DraftSteps[DraftTree]:
        """`propose` in steps, for a drafter that runs a model: those of several sequences share its
        passes (specdec.drafters.batched_drafting)."""
        return self.propose(context_ids, limits)
        yield  # what makes this a generator

    def reading(self, context_ids: Sequence[int], limit: int) -> DraftSteps[None]:
        """Compute the next `most` tokens of a context that enters, beside others' steps, in steps:
        all at once they would hold up the first step that drafts."""
        yield from ()

    def n_lacking(self, context_ids: Sequence[int]) -> int:
        """Tokens of the context that a model has still to compute before it can draft, at most; 0
        without one."""
        return 0

    @property
    def can_draft_ahead(self) -> bool:
        """Whether `drafting_ahead` would have something to do after the last proposal."""
        return False

    def drafting_ahead(self, tree: DraftTree) -> DraftSteps[None]:
        """Prepare the next proposal while the target verifies `tree`, in steps.

        Run in another thread than the other methods, and never at the same time as they. It ends
        after any step, once the pass is over.
        """
        yield from ()

    def observe(self, acceptance: Acceptance, tree: DraftTree) -> None:  # noqa: B027 (optional)
        """Told after every step: the outcome, and the tree that was verified.

        `tree` may hold nodes of other drafters, or not all of one's own:
        `acceptance.emitted(tree)` are the tokens to compare with.
        """

    @property
    def is_ready(self) -> bool:
        """Whether the outcome that was observed last was among what had been prepared."""
        return False

    def reset(self) -> None:  # noqa: B027 (optional)
        """Forget the context, and give back what it holds: the text is over, or cannot go on as it
        is. The next proposal may belong to another one."""
