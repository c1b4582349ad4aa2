"""The frontier of a growing tree, against a search from scratch at every level."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.drafters.frontier import Frontier, level_width
from specdec.drafters.grown_tree import GrownNode, GrownTree
from specdec.verification.tree import DraftTree

WIDTH = 3


def candidates_of(node: GrownNode, seed: int) -> list[tuple[int, float]]:
    """The draft's candidates after a node: equal at every call."""
    key = [seed, node.position, node.token_id, int(-1e6 * node.path_log_prob)]
    chances = np.sort(-np.random.default_rng(key).exponential(1.0, WIDTH + 1))[::-1]
    return [(token, float(chance)) for token, chance in enumerate(chances)]


def promising(tree: GrownTree, depth: int, n_best: int | None) -> list[GrownNode]:
    """By definition: the best nodes not yet run, where a child could be better still."""
    best = list(islice(tree.best_first(depth, WIDTH), n_best))
    is_full = n_best is not None and len(best) == n_best
    worst = best[-1][1].path_log_prob if is_full else -np.inf
    return [
        node
        for parent, node in best
        if parent.is_run
        and not node.is_run
        and node.path_log_prob > worst
        and node.position < tree.deepest(depth)
    ]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    depth=st.integers(1, 6),
    n_best=st.none() | st.integers(1, 60),
    width=st.integers(1, 9),
    n_grafted=st.integers(0, 4),
)
def test_levels_are_those_of_a_search_from_scratch(seed, depth, n_best, width, n_grafted) -> None:
    tree = GrownTree(0, 10, [])
    tree.root.candidate_tree(candidates_of(tree.root, seed))
    other, node = DraftTree(0), 0
    for token in range(n_grafted):  # another drafter's chain hangs below a node that was not run
        node = other.add(node, token + 7, -0.2 * (1 + seed % 5))
    tree.graft(other)
    frontier, n_run = Frontier(tree, depth, WIDTH, n_best), 0
    for _ in range(40):
        level = [node for _, node in frontier.take(width)]
        if n_grafted == 0:
            assert level == promising(tree, depth, n_best)[:width]
        if not level:
            break
        for node in level:
            n_run += 1
            tree.run(node, n_run, candidates_of(node, seed))
            frontier.add(node)
    else:
        return  # a tree without a node limit grows on
    assert promising(tree, depth, n_best) == []


def test_likely_nodes_are_run_without_the_unlikely() -> None:
    tree = GrownTree(0, 0, [(1, np.log(0.5)), (2, np.log(0.3)), (3, np.log(0.05))])
    frontier = Frontier(tree, 4)
    assert [node.token_id for _, node in frontier.take(9, min_share=0.25)] == [1, 2]
    assert [node.token_id for _, node in frontier.take(9, min_share=0.25)] == [3]
    assert frontier.take(9) == []


def test_a_large_tree_takes_few_levels() -> None:
    """A tree of 1 024 nodes has hardly more levels than one of 256."""
    runs = {}
    for n_nodes in (256, 1024):
        tree = GrownTree(0, 0, [])
        tree.root.candidate_tree(candidates_of(tree.root, 1))
        frontier, runs[n_nodes] = Frontier(tree, 32, WIDTH, n_nodes), 0
        while level := frontier.take(level_width(n_nodes)):
            runs[n_nodes] += 1
            for _, node in level:
                tree.run(node, 1, candidates_of(node, 1))
                frontier.add(node)
    assert runs[1024] <= 1.5 * runs[256]


@pytest.mark.parametrize("n_best", [200, None])
def test_of_a_wide_tree_only_what_is_looked_at_becomes_nodes(n_best: int | None) -> None:
    """1 024 candidates after each of 200 nodes would be hundreds of megabytes."""
    chances = -np.log(2.0) - 0.01 * np.arange(1024)
    candidates = list(enumerate(chances.tolist()))
    tree = GrownTree(0, 0, candidates)
    frontier, run = Frontier(tree, 32, 1024, n_best), [tree.root]
    while len(run) < 200 and (level := frontier.take(32)):
        for _, node in level:
            tree.run(node, len(run), candidates)
            frontier.add(node)
            run.append(node)
    assert len(tree.best_tree(200, 32, 1024)) == 201
    assert Frontier(tree, 32).take(32)
    assert len(run) > 100
    assert sum(len(node.children) for node in run) < 20 * len(run)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), width=st.none() | st.integers(1, 9))
def test_children_come_likeliest_first(data: st.DataObject, width: int | None) -> None:
    """The draft's candidates precede those of other drafters, added before or after."""
    chance = st.floats(-9.0, 0.0)
    before = data.draw(st.dictionaries(st.integers(0, 9), chance, max_size=3))
    offered = data.draw(st.dictionaries(st.integers(0, 9), chance, max_size=5))
    after = data.draw(st.dictionaries(st.integers(0, 9), chance, max_size=3))
    node = GrownNode(0, 0, 0.0, 0.0)
    for token, log_prob in before.items():
        node.child(token, log_prob)
    node.candidate_tree(sorted(offered.items(), key=lambda pair: -pair[1]))
    for token, log_prob in after.items():
        node.child(token, log_prob)
    expected = {**after, **offered, **before}
    actual = {child.token_id: child.log_prob for child in node.likeliest(width)}
    assert list(actual.values()) == sorted(actual.values(), reverse=True)
    assert actual == {token: expected[token] for token in actual}
    assert len(actual) == (len(expected) if width is None else min(width, len(expected)))
    draft = sorted((p for t, p in offered.items() if t not in before), reverse=True)[:width]
    own = [actual[token] for token in offered if token in actual and token not in before]
    assert sorted(own, reverse=True) == draft


def test_candidates_that_were_not_looked_at_yet_are_not_lost() -> None:
    node = GrownNode(0, 0, 0.0, 0.0)
    node.candidate_tree([(1, -0.1), (2, -0.2)])
    with pytest.raises(AssertionError, match="set once"):
        node.candidate_tree([(3, -0.1)])
