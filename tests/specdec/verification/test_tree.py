from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.verification.tree import DraftTree


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 12, vocab: int = 4) -> DraftTree:
    tree = DraftTree(draw(st.integers(0, vocab - 1)))
    for _ in range(draw(st.integers(0, max_nodes))):
        parent = draw(st.integers(0, len(tree) - 1))
        log_prob = draw(st.floats(-5.0, 0.0))
        tree.add(parent, draw(st.integers(0, vocab - 1)), log_prob, "draft")
    return tree


def small_tree() -> DraftTree:
    """root 9 -> (1 -> 3, 2)"""
    tree = DraftTree(9)
    item = tree.add(0, 1, math.log(0.6))
    tree.add(0, 2, math.log(0.3), "ngram")
    tree.add(item, 3, math.log(0.4))
    return tree


def test_shape_of_a_small_tree() -> None:
    tree = small_tree()
    assert len(tree) == 4
    assert tree.n_drafted == 3
    assert tree.token_ids == [9, 1, 2, 3]
    assert tree.parents == [-1, 0, 0, 1]
    assert tree.sources == [("root",), ("draft",), ("ngram",), ("draft",)]
    assert tree.children(0) == {1: 1, 2: 2}
    assert tree.path(3) == (0, 1, 3)
    assert tree.tokens_on_path(3) == (1, 3)
    assert tree.tokens_on_path(0) == ()
    assert tree.depths[3] == 2
    assert tree.path_log_probs[3] == pytest.approx(math.log(0.24))
    assert not tree.is_chain
    assert tree.follow((1, 3, 7)) == (0, 1, 3)
    assert tree.follow((5,)) == (0,)


def test_an_empty_tree_is_a_chain() -> None:
    tree = DraftTree(3)
    assert tree.is_chain
    assert tree.best_subset(5) is tree


def test_the_same_child_is_merged_and_keeps_the_larger_probability() -> None:
    tree = small_tree()
    row = np.array([0.5, 0.5])
    assert tree.add(0, 1, math.log(0.5), "ngram") == 1
    assert tree.sources[1] == ("draft", "ngram")
    assert tree.add(0, 1, math.log(0.9), "ngram", row) == 1
    assert tree.sources[1] == ("draft", "ngram")
    assert tree.draft_probs[1] is row
    assert len(tree) == 4
    assert tree.path_log_probs[3] == pytest.approx(math.log(0.36))  # its subtree follows
    assert tree.path_log_probs[2] == pytest.approx(math.log(0.3))


def test_log_probabilities_never_exceed_zero() -> None:
    tree = DraftTree(0)
    tree.add(0, 1, 1e-9)
    assert tree.log_probs[1] == 0.0


def test_misuse_is_an_error() -> None:
    tree = small_tree()
    for parent in (-1, 4):
        with pytest.raises(IndexError, match="not one of the tree's 4 nodes"):
            tree.add(parent, 1, -1.0)
    with pytest.raises(ValueError, match="not a number"):
        tree.add(0, 1, float("nan"))
    with pytest.raises(ValueError, match="without its parent"):
        tree.subset([0, 3])


@settings(deadline=None)
@given(trees())
def test_structure_holds(tree: DraftTree) -> None:
    for i in range(1, len(tree)):
        assert 0 <= tree.parents[i] < i
        assert tree.children(tree.parents[i])[tree.token_ids[i]] == i
        assert tree.depths[i] == len(tree.path(i)) - 1
        assert tree.follow(tree.tokens_on_path(i)) == tree.path(i)
        expected = math.fsum(tree.log_probs[j] for j in tree.path(i))
        assert tree.path_log_probs[i] == pytest.approx(expected, abs=1e-9)
    assert sum(len(tree.children(i)) for i in range(len(tree))) == tree.n_drafted


@settings(deadline=None)
@given(trees(max_nodes=8), st.integers(0, 9))
def test_best_subset_is_the_best_prefix_closed_one(tree: DraftTree, n: int) -> None:
    best = tree.best_subset(n)
    assert best.n_drafted == min(n, tree.n_drafted)
    cached = set(tree.best_indices(n))
    assert all(tree.parents[i] in cached for i in cached if i)
    assert {best.tokens_on_path(i) for i in range(len(best))} == {
        tree.tokens_on_path(i) for i in cached
    }

    def value(indices: object) -> float:
        return math.fsum(math.exp(tree.path_log_probs[i]) for i in indices)  # type: ignore

    for other in itertools.combinations(range(1, len(tree)), best.n_drafted):
        if all(tree.parents[i] in (0, *other) for i in other):
            assert value(other) <= value(cached - {0}) + 1e-9


def test_a_tree_of_1024_nodes() -> None:
    rng = np.random.default_rng(0)
    tree = DraftTree(0)
    while tree.n_drafted < 1024:
        tree.add(int(rng.integers(len(tree))), int(rng.integers(50_000)), -rng.exponential())
    best = tree.best_subset(256)
    assert best.n_drafted == 256
    assert best.parents[0] == -1
