"""Drafting under a grammar.

Tokens that the grammar forces are known without a model: GrammarDrafter proposes them, and a draft
model computes them in one run. Other drafters' proposals are cut down to allowed tokens. All of
this depends on the grammar alone, never on the target's logits, so any tree stays lossless.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.drafters.base import Drafter, TreeLimits
from specdec.drafters.batched_drafting import DraftSteps, run_steps
from specdec.drafters.frontier import Level
from specdec.grammar.state import GrammarState
from specdec.sampling.context_window import ContextWindow
from specdec.verification.acceptance import Acceptance
from specdec.verification.tree import ROOT, DraftTree

SOURCE = "grammar"


class GrammarDrafter(Drafter):
    """Drafter of forced tokens, as a chain of probability 1; nothing where there is a choice.

    The chain may be deeper than `max_depth`, which limits runs of a draft model: this needs none.

    Args:
        grammar: the sequence's grammar, in a state of the drafter's own.
        n_tokens: size of the target's vocabulary.
        max_context: maximum tokens that the target sees, prompt included.
        window: part of a context that the target sees.
    """

    def __init__(
        self,
        grammar: GrammarState,
        n_tokens: int,
        max_context: int,
        window: ContextWindow = ContextWindow(),  # noqa: B008 (immutable)
    ) -> None:
        self._grammar, self._n_tokens = grammar, n_tokens
        self._max_context, self._window = max_context, window

    def propose(self, context_ids: Sequence[int], limits: TreeLimits) -> DraftTree:
        tree, node = DraftTree(context_ids[-1]), ROOT
        if limits.max_nodes and limits.max_depth:
            n_visible = len(context_ids) - self._window.n_hidden(len(context_ids))
            length = min(limits.max_nodes, self._max_context - n_visible)
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
    """Return a level that a draft model is to run, with the forced tokens below each of its nodes.

    The model computes forced tokens together with the node before them, in one run.

    Args:
        level: nodes whose parents were run, and are above them.
        context_ids: all tokens up to the tree's root.
        n_tokens: size of the model's vocabulary.
        max_count: maximum nodes that are run together.
        deepest: position that no node may reach.
    """
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
    """Wraps a drafter: drops nodes that the grammar rules out, with their subtrees."""

    def __init__(self, drafter: Drafter, grammar: GrammarState) -> None:
        self._drafter, self._grammar = drafter, grammar

    def propose(self, context_ids: Sequence[int], limits: TreeLimits) -> DraftTree:
        return run_steps(self.propose_in_steps(context_ids, limits))

    def propose_in_steps(
        self, context_ids: Sequence[int], limits: TreeLimits
    ) -> DraftSteps[DraftTree]:
        tree = yield from self._drafter.propose_in_steps(context_ids, limits)
        allowed = {ROOT}
        for node in range(1, len(tree)):
            parent = tree.parents[node]
            if parent in allowed:
                prefix = [*context_ids, *tree.tokens_on_path(parent)]
                if self._grammar.allows(prefix, tree.token_ids[node]):
                    allowed.add(node)
        return tree if len(allowed) == len(tree) else tree.subset(sorted(allowed))

    def num_uncomputed(self, context_ids: Sequence[int]) -> int:
        return self._drafter.num_uncomputed(context_ids)

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
    """Return a drafter that follows the grammar, if there is one."""
    return drafter if grammar is None else WithinGrammar(drafter, grammar.fork())
