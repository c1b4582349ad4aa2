"""Choose the nodes of several sequences' trees that pay for their tokens in the shared pass.

There is one throughput price λ for all of them: a node gains its probability of being accepted,
whichever sequence it belongs to, and costs λ times the seconds that it adds to the pass. So a
sequence whose draft is sure gets more tokens, and a hopeless one only its pending token.
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
    """One sequence's proposal, with acceptance probabilities.

    probabilities: of each node to be accepted, float64 [nodes], the root's first.
    rate: throughput price, in tokens per second.
    """

    tree: DraftTree
    probabilities: NDArray[np.float64]
    rate: float


def choose_nodes(
    candidate_trees: Sequence[CandidateTree],
    cost: CostModel,
    num_other_tokens: int = 0,
    max_nodes: int | None = None,
) -> tuple[list[list[int]], float]:
    """Choose at most `max_nodes` nodes of all trees with the largest ΣP - λ·T(num_tokens).

    Returns, for each tree, the indices of nodes to verify, ascending from the root's; and the price
    of one more node at this size, as a probability.

    num_other_tokens: other tokens of the pass, beside the roots of these trees.
    """
    probs = np.concatenate([candidate.probabilities[1:] for candidate in candidate_trees])
    owners = np.concatenate(
        [np.full(candidate.tree.n_drafted, i) for i, candidate in enumerate(candidate_trees)]
    )
    nodes = np.concatenate([np.arange(1, len(candidate.tree)) for candidate in candidate_trees])
    order = np.argsort(-probs, kind="stable")  # parents stay before their children
    min_count = num_other_tokens + len(candidate_trees)
    # Passes larger than measured ones, with a long prompt, get no nodes.
    seconds = cost.table(min_count + len(probs))[min(min_count, MAX_MEASURED_TOKENS) - 1 :]
    # λ counts tokens of all sequences; each rate is per second of a sequence's share of the time.
    costs = float(np.mean([candidate.rate for candidate in candidate_trees])) * seconds
    tokens = np.concatenate(([0.0], np.cumsum(probs[order])))[: len(costs)]
    max_count = len(costs) - 1 if max_nodes is None else min(len(costs) - 1, max_nodes)
    n_chosen = int((tokens - costs)[: 1 + max_count].argmax())
    price = 0.0
    if n_chosen < len(probs):  # one more node would displace the best one left out
        price = float(probs[order[n_chosen]])
    elif len(costs) > 1:
        price = float(costs[-1] - costs[-2])
    chosen: list[list[int]] = [[ROOT] for _ in candidate_trees]
    for i in order[:n_chosen].tolist():
        chosen[owners[i]].append(int(nodes[i]))
    return [sorted(indices) for indices in chosen], price
