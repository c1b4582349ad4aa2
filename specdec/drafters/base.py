"""The contract of everything that guesses the target's next tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from specdec.acceptance import Acceptance
from specdec.tree import DraftTree


@dataclass(frozen=True)
class TreeLimits:
    """How large a proposal may be."""

    max_nodes: int  # drafted nodes; the root is not counted
    max_depth: int
    width: int  # children of one node; 1 asks for a chain
    min_level_probability: float = 0.0
    """A new level whose nodes have a smaller path probability in total is not run."""

    def __post_init__(self) -> None:
        if self.max_nodes < 0 or self.max_depth < 0 or self.width < 1:
            raise ValueError(f"limits of a tree must not be negative, nor its width 0: {self}")


class Drafter(ABC):
    """Proposes trees of candidate tokens, and learns from what the target accepts.

    A drafter never sees the target's logits or choices of the round it drafts for: that is what
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

    def observe(self, acceptance: Acceptance, tree: DraftTree) -> None:  # noqa: B027 (optional)
        """Told after every round: the outcome, and the tree that was verified.

        `tree` may hold nodes of other drafters, or not all of one's own:
        `acceptance.emitted(tree)` are the tokens to compare with.
        """

    def reset(self) -> None:  # noqa: B027 (optional)
        """Forget the context: the next proposal belongs to another text."""

    def close(self) -> None:  # noqa: B027 (optional)
        """Free what the drafter holds; may be called twice."""

    def __enter__(self) -> Drafter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
