"""Which nodes of several texts' trees are worth their rows in the pass that they share.

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
class Offer:
    """What one text's drafters propose.

    probabilities: that each node is accepted, float64 [nodes], the root's first.
    rate: tokens per second, by which it weighs a second.
    """

    tree: DraftTree
    probabilities: NDArray[np.float64]
    rate: float


def choose_nodes(
    offers: Sequence[Offer],
    cost: CostModel,
    n_other_rows: int = 0,
    max_nodes: int | None = None,
) -> tuple[list[list[int]], float]:
    """The nodes with the largest ΣP - λ·T(rows), of all offers together, at most `max_nodes`.

    Returns of each offer the indices of nodes to verify, the root's first, ascending; and what one
    more node costs at this size, as a probability.

    n_other_rows: of the pass, which are there in any case, beside the roots of these trees.
    """
    probs = np.concatenate([offer.probabilities[1:] for offer in offers])
    owners = np.concatenate([np.full(offer.tree.n_drafted, i) for i, offer in enumerate(offers)])
    nodes = np.concatenate([np.arange(1, len(offer.tree)) for offer in offers])
    order = np.argsort(-probs, kind="stable")  # parents stay before their children
    n_least = n_other_rows + len(offers)
    # Passes of more tokens than are measured, a long prompt's, take no nodes beside them.
    seconds = cost.table(n_least + len(probs))[min(n_least, MAX_MEASURED_TOKENS) - 1 :]
    # With λ tokens of all texts per second; the rates are those of their shares of the time.
    costs = float(np.mean([offer.rate for offer in offers])) * seconds
    tokens = np.concatenate(([0.0], np.cumsum(probs[order])))[: len(costs)]
    n_most = len(costs) - 1 if max_nodes is None else min(len(costs) - 1, max_nodes)
    n_kept = int((tokens - costs)[: 1 + n_most].argmax())
    price = 0.0
    if n_kept < len(probs):
        price = float(probs[order[n_kept]])  # a node more takes the place of the best one left out
    elif len(costs) > 1:
        price = float(costs[-1] - costs[-2])
    kept: list[list[int]] = [[ROOT] for _ in offers]
    for i in order[:n_kept].tolist():
        kept[owners[i]].append(int(nodes[i]))
    return [sorted(indices) for indices in kept], price
