"""Which nodes of several sequences' trees are worth their rows in the pass that they share.

One λ for all of them: a node is worth its probability of being accepted, whichever text it belongs
to, and costs λ times the seconds by which its row makes the pass longer. So a text whose draft is
sure gets more rows, and a hopeless one the single row of its pending token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.policy.cost_model import MAX_MEASURED_TOKENS, CostModel
from specdec.verification.tree import ROOT, DraftTree


@dataclass(frozen=True)
class CandidateTree:
    """What one text's drafters propose.

    probabilities: that each node is accepted, float64 [nodes], the root's first.
    rate: tokens per second, by which it weighs a second.
    """

    tree: DraftTree
    probabilities: NDArray[np.float64]
    rate: float


def choose_nodes(
    offers: Sequence[CandidateTree],
    cost: CostModel,
    num_other_tokens: int = 0,
    max_nodes: int | None = None,
) -> tuple[list[list[int]], float]:
    """The nodes with the largest ΣP - λ·T(rows), of all offers together, at most `max_nodes`.

    Returns of each offer the indices of nodes to verify, the root's first, ascending; and what one
    more node costs at this size, as a probability.

    n_other_rows: of the pass, which are there in any case, beside the roots of these trees.
    """
    probs = np.concatenate([candidate_tree.probabilities[1:] for candidate_tree in offers])
    owners = np.concatenate(
        [np.full(candidate_tree.tree.n_drafted, i) for i, candidate_tree in enumerate(offers)]
    )
    nodes = np.concatenate([np.arange(1, len(candidate_tree.tree)) for candidate_tree in offers])
    order = np.argsort(-probs, kind="stable")  # parents stay before their children
    min_count = num_other_tokens + len(offers)
    # Passes of more tokens than are measured, a long prompt's, take no nodes beside them.
    seconds = cost.table(min_count + len(probs))[min(min_count, MAX_MEASURED_TOKENS) - 1 :]
    # With λ tokens of all sequences per second; the rates are those of their shares of the time.
    costs = float(np.mean([candidate_tree.rate for candidate_tree in offers])) * seconds
    tokens = np.concatenate(([0.0], np.cumsum(probs[order])))[: len(costs)]
    max_count = len(costs) - 1 if max_nodes is None else min(len(costs) - 1, max_nodes)
    num_retained = int((tokens - costs)[: 1 + max_count].argmax())
    price = 0.0
    if num_retained < len(probs):
        price = float(
            probs[order[num_retained]]
        )  # a node more takes the place of the best one left out
    elif len(costs) > 1:
        price = float(costs[-1] - costs[-2])
    cached: list[list[int]] = [[ROOT] for _ in offers]
    for i in order[:num_retained].tolist():
        cached[owners[i]].append(int(nodes[i]))
    return [sorted(indices) for indices in cached], price
