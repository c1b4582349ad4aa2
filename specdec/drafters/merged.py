"""MergedDrafter: one tree out of the proposals of several drafters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from specdec.acceptance import Acceptance
from specdec.drafters.base import Drafter, TreeLimits
from specdec.tree import ROOT, DraftTree


class MergedDrafter(Drafter):
    """Merges trees token by token and keeps the most probable nodes of their union.

    A token that several drafters propose at the same place is one node with the largest of their
    probabilities. When a chain is asked for (width 1), it is the first non-empty proposal in the
    given order: choosing between chains by their probabilities would bias which sampled chains
    reach the target, and with them the rejection rule.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if not drafters:
            raise ValueError("MergedDrafter needs at least one drafter")
        self.drafters = tuple(drafters)

    def propose(self, context_ids: Sequence[int], limits: TreeLimits) -> DraftTree:
        if limits.width == 1:
            return self._first_chain(context_ids, limits)
        trees = [drafter.propose(context_ids, limits) for drafter in self.drafters]
        return merge_trees(trees).best_subset(limits.max_nodes)

    def _first_chain(self, context_ids: Sequence[int], limits: TreeLimits) -> DraftTree:
        for drafter in self.drafters:
            tree = drafter.propose(context_ids, limits)
            if tree.n_drafted:
                return tree
        return DraftTree(context_ids[-1])

    def observe(self, acceptance: Acceptance, tree: DraftTree) -> None:
        for drafter in self.drafters:
            drafter.observe(acceptance, tree)

    def reset(self) -> None:
        for drafter in self.drafters:
            drafter.reset()

    def close(self) -> None:
        """Close every drafter, also when one of them fails; the first error is raised."""
        with ExitStack() as stack:
            for drafter in reversed(self.drafters):
                stack.callback(drafter.close)


def merge_trees(trees: Sequence[DraftTree]) -> DraftTree:
    """The union of trees with the same root token, as a new tree."""
    merged = DraftTree(trees[0].token_ids[ROOT])
    for tree in trees:
        if tree.token_ids[ROOT] != merged.token_ids[ROOT]:
            raise ValueError("trees with different root tokens cannot be merged")
        new_index = [ROOT]
        for i in range(1, len(tree)):
            new_index.append(
                merged.add(
                    new_index[tree.parents[i]],
                    tree.token_ids[i],
                    tree.log_probs[i],
                    tree.sources[i],
                    tree.draft_probs[i],
                )
            )
    return merged
