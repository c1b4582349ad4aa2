"""MergedDrafter: merge the proposals of several drafters into one tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from backends.contract.sequence import SequenceKV
from specdec.drafters.base import Drafter, TreeLimits
from specdec.drafters.batched_drafting import DraftSteps, run_steps
from specdec.verification.acceptance import Acceptance
from specdec.verification.tree import ROOT, DraftTree


class MergedDrafter(Drafter):
    """Merges trees token by token and keeps the most probable nodes of their union.

    A token that several drafters propose at the same place is one node with the largest of their
    probabilities and all of their names. Where the union has more children of a node than the
    limits allow, the most probable ones stay.

    The last drafter proposes first, so that the first one, a model whose runs take time, knows what
    is proposed without it.

    Not for chains *drawn* from a draft, which the chain rules need: choosing between such chains by
    their probabilities would bias which of them reach the target. `SpecConfig` allows those rules
    one drafter.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if not drafters:
            raise ValueError("MergedDrafter needs at least one drafter")
        self.drafters = tuple(drafters)

    def propose(self, context_ids: Sequence[int], limits: TreeLimits) -> DraftTree:
        return run_steps(self.propose_in_steps(context_ids, limits))

    def propose_in_steps(
        self, context_ids: Sequence[int], limits: TreeLimits
    ) -> DraftSteps[DraftTree]:
        trees: list[DraftTree] = []
        for drafter in reversed(self.drafters):
            known = merge_trees(trees) if trees else None
            limited = replace(limits, known=known)
            trees.insert(0, (yield from drafter.propose_in_steps(context_ids, limited)))
        return narrowed(merge_trees(trees), limits.width).best_subset(limits.max_nodes)

    def prefill_in_steps(self, context_ids: Sequence[int], limit: int) -> DraftSteps[None]:
        for drafter in self.drafters:
            yield from drafter.prefill_in_steps(context_ids, limit)

    def num_uncomputed(self, context_ids: Sequence[int]) -> int:
        return sum(drafter.num_uncomputed(context_ids) for drafter in self.drafters)

    @property
    def can_draft_ahead(self) -> bool:
        return any(drafter.can_draft_ahead for drafter in self.drafters)

    def drafting_ahead(self, tree: DraftTree) -> DraftSteps[None]:
        for drafter in self.drafters:
            if drafter.can_draft_ahead:
                yield from drafter.drafting_ahead(tree)

    @property
    def max_hidden_states(self) -> int:
        return max(drafter.max_hidden_states for drafter in self.drafters)

    def take_hidden_states(self, position: int, states: NDArray[np.float32]) -> None:
        for drafter in self.drafters:
            drafter.take_hidden_states(position, states)

    def take_kv(self, kv: SequenceKV) -> None:
        for drafter in self.drafters:
            drafter.take_kv(kv)

    @property
    def is_ready(self) -> bool:
        return any(drafter.is_ready for drafter in self.drafters)

    def observe(self, acceptance: Acceptance, tree: DraftTree) -> None:
        for drafter in self.drafters:
            drafter.observe(acceptance, tree)

    def reset(self) -> None:
        for drafter in self.drafters:
            drafter.reset()


def merge_trees(trees: Sequence[DraftTree]) -> DraftTree:
    """Return the union of trees with the same root token, as a new tree.

    Raises ValueError for different roots, and for tokens that were drawn (see MergedDrafter).
    """
    merged = DraftTree(trees[0].token_ids[ROOT])
    for tree in trees:
        if tree.token_ids[ROOT] != merged.token_ids[ROOT]:
            raise ValueError("trees with different root tokens cannot be merged")
        if any(row is not None for row in tree.draft_probs):
            raise ValueError("a chain that was drawn from its draft cannot be merged")
        merged.n_runs += tree.n_runs
        merged.n_run_nodes += tree.n_run_nodes
        new_index = [ROOT]
        for i in range(1, len(tree)):
            new_index.append(
                merged.add(
                    new_index[tree.parents[i]],
                    tree.token_ids[i],
                    tree.log_probs[i],
                    tree.sources[i],
                )
            )
    return merged


def narrowed(tree: DraftTree, width: int) -> DraftTree:
    """Return the tree with at most `width` children per node, the most probable ones.

    Dropped nodes take their subtrees with them. Ties go to the child that was added first.
    """
    chosen = {ROOT}
    for node in range(len(tree)):
        if node in chosen:
            children = tree.children(node).values()
            chosen.update(sorted(children, key=lambda i: -tree.log_probs[i])[:width])
    return tree if len(chosen) == len(tree) else tree.subset(sorted(chosen))
