"""Drafting where the text has to keep to a grammar.

What the grammar forces is known without a model: GrammarDrafter proposes it as it is, and a draft
model reads it in one run. What other drafters propose is cut down to what may follow. All of them
look at the grammar alone, never at the target's logits, so any tree stays lossless.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.drafters.base import Drafter, TreeLimits
from specdec.drafters.batched_drafting import DraftSteps, run_steps
from specdec.drafters.frontier import Level
from specdec.grammar.state import GrammarState
from specdec.verification.acceptance import Acceptance
from specdec.verification.tree import ROOT, DraftTree

SOURCE = "grammar"


class GrammarDrafter(Drafter):
    """The tokens that must follow, as a chain of probability 1; nothing where there is a choice.

    The chain may be deeper than the limits say: those of depth are about runs of a draft model, and
    this one needs none.

    Args:
        grammar: that the text has to keep to; the drafter's own.
        n_tokens: tokens that exist for the target.
        max_context: most tokens of prompt and text together.
    """

    def __init__(self, grammar: GrammarState, n_tokens: int, max_context: int) -> None:
        self._grammar, self._n_tokens, self._max_context = grammar, n_tokens, max_context

    def propose(self, context_ids: Sequence[int], limits: TreeLimits) -> DraftTree:
        tree, node = DraftTree(context_ids[-1]), ROOT
        if limits.max_nodes and limits.max_depth:
            length = min(limits.max_nodes, self._max_context - len(context_ids))
            for token in self._grammar.forced(context_ids, self._n_tokens)[:length]:
                node = tree.add(node, token, 0.0, SOURCE)
        return tree


def with_forced(
    level: Level,
    grammar: GrammarState,
    context_ids: Sequence[int],
    *,
    n_tokens: int,
    max_count: int,
    deepest: int,
) -> Level:
    """A level that a draft model is to run, and below each of its nodes what must follow it.

    The model reads a forced stretch together with the node before it, in one run, and goes on
    behind it.

    Args:
        level: nodes whose parents were run.
        context_ids: all tokens up to the tree's root.
        n_tokens: tokens that exist for the model.
        n_most: nodes that may be run together.
        deepest: position that no node may come to.
    """
    for parent, node in level:
        node.above = parent
    result = list(level)
    for _, node in level:
        forced = grammar.forced([*context_ids, *node.tokens_below_root()], n_tokens)
        capacity = max(0, min(max_count - len(result), deepest - 1 - node.position))
        for token in forced[:capacity]:
            child = node.child(token, 0.0)
            child.above = node
            result.append((node, child))
            node = child
    return result


class WithinGrammar(Drafter):
    """Another drafter's proposals, less what may not follow and all that hangs below it."""

    def __init__(self, drafter: Drafter, grammar: GrammarState) -> None:
        self._drafter, self._grammar = drafter, grammar

    def propose(self, context_ids: Sequence[int], limits: TreeLimits) -> DraftTree:
        return run_steps(self.proposing(context_ids, limits))

    def proposing(self, context_ids: Sequence[int], limits: TreeLimits) -> DraftSteps[DraftTree]:
        tree = yield from self._drafter.proposing(context_ids, limits)
        cached = {ROOT}
        for node in range(1, len(tree)):
            above = tree.parents[node]
            if above in cached:
                prefix = [*context_ids, *tree.tokens_on_path(above)]
                if self._grammar.allows(prefix, tree.token_ids[node]):
                    cached.add(node)
        return tree if len(cached) == len(tree) else tree.subset(sorted(cached))

    def n_lacking(self, context_ids: Sequence[int]) -> int:
        return self._drafter.n_lacking(context_ids)

    @property
    def can_draft_ahead(self) -> bool:
        return self._drafter.can_draft_ahead

    def drafting_ahead(self, tree: DraftTree) -> DraftSteps[None]:
        return self._drafter.drafting_ahead(tree)

    @property
    def is_ready(self) -> bool:
        return self._drafter.is_ready

    def observe(self, acceptance: Acceptance, tree: DraftTree) -> None:
        self._drafter.observe(acceptance, tree)

    def reset(self) -> None:
        self._drafter.reset()


def within_grammar(drafter: Drafter, grammar: GrammarState | None) -> Drafter:
    """A drafter that keeps to the grammar, if there is one."""
    return drafter if grammar is None else WithinGrammar(drafter, grammar.fork())
