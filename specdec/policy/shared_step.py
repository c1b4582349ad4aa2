"""Policy of one step for all sequences that share its pass: trim the trees, then share the costs.

Called in this order after `DraftPolicy.limits`: `trim_together`, `should_draft_ahead`,
`observe_together`. The time from `limits` to `trim_together` is drafting not hidden by a pass, the
time from there to `observe_together` is the pass and the work after it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec.policy.draft_policy import DraftPolicy
from specdec.policy.modes import Outcome
from specdec.policy.shared_pass import choose_nodes
from specdec.verification.acceptance import Acceptance
from specdec.verification.tree import DraftTree

_MAX_OUTLIER = 3.0
"""Maximum ratio of a pass's time to the expected one; longer passes are outliers, and count as this
(bench/scenarios: without it, 0.86 of the speed in memory where a tenth of all passes are outliers;
with 2, passes that became four times as slow are taken for 3.5 times after 220 tokens)."""


def trim_together(
    policies: Sequence[DraftPolicy],
    trees: Sequence[DraftTree],
    num_other_tokens: int = 0,
    max_nodes: int | None = None,
) -> list[DraftTree]:
    """Return the sequences' proposals, trimmed to the nodes that pay in one pass.

    num_other_tokens: prompt tokens of the pass.
    max_nodes: maximum draft tokens of the pass.
    """
    _note_drafting(policies, trees)
    trimmed = list(trees)
    trimmable = [i for i, policy in enumerate(policies) if not policy.is_whole]
    n_whole = sum(len(tree) for i, tree in enumerate(trees) if i not in trimmable)
    if trimmable:
        steps = [policies[i].step for i in trimmable]
        shapes = [policies[i].shape for i in trimmable]
        candidate_trees = [
            shape.candidate_tree(trees[i]) for i, shape in zip(trimmable, shapes, strict=True)
        ]
        num_others = num_other_tokens + n_whole
        n_left = None
        if max_nodes is not None:
            n_left = max_nodes - n_whole + len(trees) - len(trimmable)
        cost = policies[0].pair_statistics.cost
        chosen, price = choose_nodes(candidate_trees, cost, num_others, n_left)
        for i, shape, this, candidate_tree, indices in zip(
            trimmable, shapes, steps, candidate_trees, chosen, strict=True
        ):
            trimmed[i] = shape.cut(candidate_tree, indices, price, this.uses_draft)
    for policy, tree in zip(policies, trimmed, strict=True):
        if policy.is_chain and policy.config.num_draft_tokens is None:
            policy.acceptance_statistics.observe_tree_size(tree.n_drafted)
        policy.step.num_tokens = num_other_tokens + sum(map(len, trimmed))
    return trimmed


def _note_drafting(policies: Sequence[DraftPolicy], trees: Sequence[DraftTree]) -> None:
    """Record the step's drafting time.

    Sequences that used the draft share it equally; those whose draft cache lacked tokens also pay
    for computing these.
    """
    now, pair_statistics = policies[0].clock(), policies[0].pair_statistics
    for policy, tree in zip(policies, trees, strict=True):
        policy.step.drafted_at, policy.step.candidates = now, tree
    used = [policy.step for policy in policies if policy.step.uses_draft]
    if not used:  # n-grams alone: next to nothing, and nobody's draft model is judged by it
        policies[0].step.draft_seconds = now - policies[0].step.began
        return
    n_runs = max(tree.n_runs for tree in trees)
    seconds = usual = now - min(this.began for this in used)
    behind = [this for this in used if this.is_catching_up]
    if behind:  # this step's time is no measurement of usual drafting
        usual = min(seconds, n_runs * pair_statistics.draft_pass_seconds)
    else:
        pair_statistics.note_drafting(n_runs, seconds)
    for this in used:
        this.draft_seconds = usual / len(used)
    for this in behind:
        if not this.is_first:  # the prompt has to be computed in any case
            this.catch_up_seconds = (seconds - usual) / len(behind)


def should_draft_ahead(policies: Sequence[DraftPolicy]) -> bool:
    """Return whether to draft the next trees while these are verified.

    "auto" does so where the target streams, because processors wait for reads there.
    """
    for policy in policies:
        this, setting = policy.step, policy.config.draft_ahead
        pays = this.uses_draft and policy.pair_statistics.cost.is_streamed
        this.is_ahead = setting == "on" or (setting == "auto" and pays)
    return any(policy.step.is_ahead for policy in policies)


def observe_together(
    policies: Sequence[DraftPolicy],
    acceptances: Sequence[Acceptance],
    trees: Sequence[DraftTree],
    stall_seconds: float = 0.0,
) -> None:
    """Learn from a finished step: the trees as verified, and their outcomes.

    Each sequence pays for an equal share of the pass without drafts, and for its own draft tokens.
    Sequences with the same DraftChoice count as one mean outcome: it chose once for all of them.

    stall_seconds: time for which the pass waited for weights.
    """
    this, cost = policies[0].step, policies[0].pair_statistics.cost
    measured = policies[0].clock() - this.drafted_at
    seconds = min(measured, _MAX_OUTLIER * cost.seconds(this.num_tokens))
    if measured > 0.0:
        cost.observe(this.num_tokens, seconds, stall_seconds * seconds / measured)
    num_seqs, n_more = len(policies), sum(tree.n_drafted for tree in trees)
    # Prompts pay for themselves.
    seconds *= cost.seconds(num_seqs + n_more) / cost.seconds(this.num_tokens)
    minimum = min(seconds, cost.seconds(num_seqs)) if n_more else seconds
    outcomes: dict[tuple[int, bool], list[tuple[DraftPolicy, Outcome]]] = {}
    for policy, acceptance, tree in zip(policies, acceptances, trees, strict=True):
        node_seconds = (seconds - minimum) / n_more if n_more else 0.0
        outcome = policy.learn(acceptance, tree, minimum / num_seqs, node_seconds)
        if outcome is not None:
            key = id(policy.choice), policy.step.uses_draft
            outcomes.setdefault(key, []).append((policy, outcome))
    for (_, uses_draft), own in outcomes.items():
        mean = Outcome(*np.mean([outcome for _, outcome in own], axis=0).tolist())
        own[0][0].choice.record(uses_draft, mean, len(own))
