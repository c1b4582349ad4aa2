"""The choice of nodes of several sequences' trees for one pass, against every other choice."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.policy.cost_model import CostModel
from specdec.policy.shared_pass import CandidateTree, choose_nodes
from specdec.verification.tree import DraftTree

MAX_NUM_TOKENS = 24


@st.composite
def proposals(draw: st.DrawFn, n_nodes: int = 4) -> DraftTree:
    tree = DraftTree(0)
    for _ in range(draw(st.integers(0, n_nodes))):
        parent = draw(st.integers(0, len(tree) - 1))
        tree.add(parent, draw(st.integers(0, 4)), math.log(draw(st.floats(0.01, 0.99))))
    return tree


def candidate_trees(trees: list[DraftTree], rate: float) -> list[CandidateTree]:
    return [CandidateTree(tree, np.exp(np.array(tree.path_log_probs)), rate) for tree in trees]


@given(
    st.lists(proposals(), min_size=1, max_size=3),
    st.floats(0.001, 0.3),
    st.integers(0, 3),
)
def test_no_other_nodes_are_worth_more(trees: list[DraftTree], per_row: float, n_other: int):
    """Tokens - λ * seconds, over all prefix-closed sets of nodes of every sequence."""
    cost = CostModel(0.0, 1.0, per_row)
    rate = 0.7
    chosen, _ = choose_nodes(candidate_trees(trees, rate), cost, n_other)
    seconds = cost.table(MAX_NUM_TOKENS)

    def value(sets: tuple[tuple[int, ...], ...]) -> float:
        probs = sum(
            math.exp(tree.path_log_probs[i])
            for tree, nodes in zip(trees, sets, strict=True)
            for i in nodes
        )
        num_tokens = n_other + len(trees) + sum(map(len, sets))
        return probs - rate * float(seconds[num_tokens - 1])

    actual = tuple(tuple(indices[1:]) for indices in chosen)
    best = max(value(sets) for sets in itertools.product(*map(closed_sets, trees)))
    assert value(actual) == pytest.approx(best, abs=1e-9)
    assert all(nodes in closed_sets(tree) for tree, nodes in zip(trees, actual, strict=True))


def closed_sets(tree: DraftTree) -> list[tuple[int, ...]]:
    """Yield all sets of nodes that contain the parents of each of their nodes."""
    return [
        nodes
        for n in range(len(tree))
        for nodes in itertools.combinations(range(1, len(tree)), n)
        if all(tree.parents[i] in (0, *nodes) for i in nodes)
    ]


def test_a_predictable_sequence_gets_the_tokens_that_an_unpredictable_one_does_not() -> None:
    sure, hopeless = DraftTree(0), DraftTree(0)
    node = 0
    for token in range(6):
        node = sure.add(node, token, math.log(0.95))
        hopeless.add(0, token, math.log(0.01))
    cost = CostModel(0.0, 1.0, 0.1)
    chosen, _ = choose_nodes(candidate_trees([hopeless, sure], 2.0), cost)
    assert chosen == [[0], [0, 1, 2, 3, 4, 5, 6]]


def test_no_pass_has_more_tokens_than_are_measured() -> None:
    tree = DraftTree(0)
    for token in range(40):
        tree.add(0, token, math.log(0.02))
    chosen, _ = choose_nodes(candidate_trees([tree], 0.5), CostModel(1.0, 0.0, 1e-9), 1024 - 16)
    assert len(chosen[0]) == 16
