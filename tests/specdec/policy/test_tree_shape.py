"""How deep a tree may be while a draft is on trial, and which part of one is worth verifying."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.config import SpecConfig
from specdec.policy.costs import PassCost
from specdec.policy.experience import Experience, Lessons
from specdec.policy.modes import DraftChoice
from specdec.policy.tree_shape import TreeShape
from specdec.verification.tree import DraftTree


@pytest.mark.parametrize(("level_seconds", "depth"), [(0.048, 20), (0.18, 5), (0.6, 1), (0.9, 1)])
def test_a_first_tree_has_the_levels_that_may_all_be_lost(level_seconds, depth):
    """Half of two tokens, which take a second each."""
    experience = Experience(PassCost(1.0, 0.1, 0.001), PassCost(level_seconds, 0.0, 1e-9), 128)
    promising = Lessons(DraftChoice((9.0, 1.0), plain_seconds=1.0))
    shape = TreeShape(SpecConfig(), experience, promising, has_model=True)
    assert shape.limits(128, 32, uses_draft=True).max_depth == depth


@st.composite
def proposals(draw: st.DrawFn) -> DraftTree:
    tree = DraftTree(0)
    for _ in range(draw(st.integers(0, 8))):
        parent = draw(st.integers(0, len(tree) - 1))
        tree.add(parent, draw(st.integers(0, 4)), math.log(draw(st.floats(0.01, 0.99))))
    return tree


@given(proposals(), st.floats(0.001, 0.05))
def test_no_other_subtree_is_worth_more(tree: DraftTree, per_row: float) -> None:
    """Against every prefix-closed set of nodes: tokens - λ * seconds."""
    cost = PassCost(0.0, 1.0, per_row)
    lessons = Lessons(DraftChoice(None, cost.seconds(1)))
    experience = Experience(cost, None, 8)
    shape = TreeShape(SpecConfig(), experience, lessons, has_model=False)
    seconds, rate = experience.passes.seconds(len(tree)), lessons.choice.rate
    kept = shape.best_part(tree, uses_draft=False, draft_seconds=0.0)
    probs = np.exp(tree.path_log_probs)

    def value(nodes: tuple[int, ...]) -> float:
        return 1.0 + sum(probs[i] for i in nodes) - rate * seconds[len(nodes)]

    closed = (
        nodes
        for n in range(len(tree))
        for nodes in itertools.combinations(range(1, len(tree)), n)
        if all(tree.parents[i] in (0, *nodes) for i in nodes)
    )
    expected = 1.0 + sum(np.exp(kept.path_log_probs[1:])) - rate * seconds[kept.n_drafted]
    assert expected == pytest.approx(max(value(nodes) for nodes in closed), abs=1e-9)
