"""Trees over marginals: the best nodes, as enumeration finds them."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specdec.drafters.candidates import Candidates
from specdec.drafters.marginals import best_tree
from specdec.verification.tree import DraftTree

ROOT_TOKEN = 7


@st.composite
def marginals(draw: st.DrawFn) -> list[Candidates]:
    """Draw the candidates of each level, likeliest first, with distinct probabilities."""
    levels = []
    for _ in range(draw(st.integers(1, 4))):
        weights = draw(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4, unique=True))
        probs = np.sort(np.array(weights))[::-1] / sum(weights)
        levels.append([(10 + i, float(np.log(p))) for i, p in enumerate(probs)])
    return levels


def nodes_of(tree: DraftTree) -> dict[tuple[int, ...], float]:
    return {tree.tokens_on_path(i): tree.path_log_probs[i] for i in range(1, len(tree))}


def enumerated(levels: list[Candidates], max_depth: int) -> dict[tuple[int, ...], float]:
    """Return the log probability of every path of any length."""
    paths = {}
    for depth in range(1, min(max_depth, len(levels)) + 1):
        for path in product(*levels[:depth]):
            paths[tuple(token for token, _ in path)] = sum(log_prob for _, log_prob in path)
    return paths


@given(marginals(), st.integers(0, 20), st.integers(0, 5))
def test_the_tree_has_the_best_nodes(levels, max_nodes, max_depth):
    depth = min(max_depth, len(levels))
    tree = best_tree(ROOT_TOKEN, lambda path: levels[len(path)], max_nodes, depth)
    paths, nodes = enumerated(levels, depth), nodes_of(tree)
    assert tree.token_ids[0] == ROOT_TOKEN
    assert len(nodes) == min(max_nodes, len(paths))
    for path, log_prob in nodes.items():
        assert abs(log_prob - paths[path]) < 1e-9
    best = sorted(paths.values(), reverse=True)[: len(nodes)]
    np.testing.assert_allclose(sorted(nodes.values(), reverse=True), best, atol=1e-9)


@given(marginals(), st.integers(1, 6))
def test_one_candidate_each_is_a_chain(levels, max_nodes):
    first = [candidates[:1] for candidates in levels]
    tree = best_tree(ROOT_TOKEN, lambda path: first[len(path)], max_nodes, len(first))
    assert tree.is_chain
    assert tree.token_ids[1:] == [c[0][0] for c in first[:max_nodes]]


def test_candidates_may_depend_on_the_path():
    after = {(): [(1, -0.5), (2, -1.0)], (1,): [(3, -0.1)], (2,): [], (1, 3): [(4, -0.2)]}
    tree = best_tree(ROOT_TOKEN, lambda path: after[tuple(path)], 9, 3)
    assert set(nodes_of(tree)) == {(1,), (2,), (1, 3), (1, 3, 4)}
