"""The acceptance rules emit exactly the target's distribution (enumerated, error ≤ 1e-12)."""

from __future__ import annotations

import numpy as np
import pytest
from exact_rules import (
    KINDS,
    chain_error,
    enumerate_outcomes,
    fixed_tree_error,
    make_case,
    match_rule,
)

from specdec.verification.acceptance import (
    Acceptance,
    accept_probability,
    residual,
    sample_index,
    verify_match,
    verify_rejection,
)
from specdec.verification.block import verify_block
from specdec.verification.tree import DraftTree

EXACT = 1e-12
CHAIN_WALKS = [verify_rejection, verify_block]


@pytest.mark.parametrize("walk", CHAIN_WALKS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "depth"), [(2, 3), (4, 2), (4, 3), (8, 1), (8, 2), (8, 3)])
def test_chain_rules_are_exact(vocab: int, depth: int, kind: str, walk) -> None:
    case = make_case(vocab, depth, seed=vocab * 10 + depth, kind=kind)
    assert chain_error(walk, case) <= EXACT


@pytest.mark.parametrize("walk", CHAIN_WALKS)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("stop", [frozenset(), frozenset({1}), frozenset({0, 2})])
@pytest.mark.parametrize("kind", ["random", "zeros"])
def test_chain_rules_are_exact_where_a_sequence_may_end(
    max_tokens: int, stop: frozenset[int], kind: str, walk
) -> None:
    case = make_case(4, 3, seed=5, kind=kind)
    assert chain_error(walk, case, max_tokens=max_tokens, stop_tokens=stop) <= EXACT


GIVING_UP = {
    "after one token": lambda tokens: len(tokens) == 1,
    "at once": lambda tokens: True,
    "at a token": lambda tokens: tokens[-1:] == (1,),
    "where tokens repeat": lambda tokens: len(set(tokens)) < len(tokens),
}


@pytest.mark.parametrize("walk", CHAIN_WALKS)
@pytest.mark.parametrize("name", GIVING_UP)
def test_chain_rules_are_exact_for_a_drafter_that_gives_up(name: str, walk) -> None:
    """The end may depend on the tokens drawn."""
    case = make_case(4, 3, seed=6, kind="random")
    stop = frozenset({2})
    assert chain_error(walk, case, GIVING_UP[name]) <= EXACT
    assert chain_error(walk, case, GIVING_UP[name], max_tokens=3, stop_tokens=stop) <= EXACT


@pytest.mark.parametrize("rule", [*CHAIN_WALKS, match_rule])
def test_deterministic_chain_is_exact(rule) -> None:
    """A chain without rows of q (from an n-gram) was chosen with certainty."""
    case = make_case(5, 3, seed=8, kind="random")
    tree = DraftTree(0)
    node = 0
    for token in (3, 3, 1):
        node = tree.add(node, token, -0.5, "ngram")
    assert fixed_tree_error(rule, tree, case) <= EXACT


def random_tree(vocab: int, depth: int, n_nodes: int, seed: int) -> DraftTree:
    rng = np.random.default_rng(seed)
    tree = DraftTree(0)
    for _ in range(n_nodes):
        parent = int(rng.integers(len(tree)))
        if tree.depths[parent] < depth:
            tree.add(parent, int(rng.integers(vocab)), -float(rng.random()))
    return tree


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["random", "zeros", "top_p both"])
def test_match_walk_is_exact_for_any_tree(seed: int, kind: str) -> None:
    vocab, depth = (4, 3) if seed % 2 else (8, 2)
    case = make_case(vocab, depth, seed, kind)
    tree = random_tree(vocab, depth, n_nodes=3 * seed, seed=seed)
    assert fixed_tree_error(match_rule, tree, case) <= EXACT


@pytest.mark.parametrize("max_tokens", [1, 2, 4])
@pytest.mark.parametrize("stop", [frozenset(), frozenset({0, 2})])
def test_match_walk_is_exact_with_limits(max_tokens: int, stop: frozenset[int]) -> None:
    case = make_case(4, 3, seed=2, kind="random")
    tree = random_tree(4, 3, n_nodes=30, seed=1)
    error = fixed_tree_error(match_rule, tree, case, max_tokens=max_tokens, stop_tokens=stop)
    assert error <= EXACT


@pytest.mark.parametrize("rule", [*CHAIN_WALKS, match_rule])
@pytest.mark.parametrize("max_tokens", [None, 1, 2, 3, 4])
def test_nothing_is_emitted_past_a_stop_token_or_the_limit(rule, max_tokens) -> None:
    case = make_case(3, 3, seed=4, kind="random")
    tree = DraftTree(0)
    node = 0
    for i, token in enumerate((1, 2, 1)):
        row = case.draft((1, 2, 1)[:i])
        node = tree.add(node, token, float(np.log(row[token])), "draft", row)

    def probs(node: int) -> np.ndarray:
        return case.target(tree.tokens_on_path(node))

    stops = frozenset({2})
    for outcome, weight in enumerate_outcomes(
        lambda d: rule(tree, probs, d, max_tokens=max_tokens, stop_tokens=stops)
    ):
        emitted = outcome.emitted(tree)
        assert weight > 0.0
        assert max_tokens is None or len(emitted) <= max_tokens
        assert not stops & set(emitted[:-1])


@pytest.mark.parametrize("stop_offset", range(4))
def test_stop_token_at_every_offset_of_a_full_match(stop_offset: int) -> None:
    tokens = [5, 6, 7, 8]
    tree = DraftTree(0)
    node = 0
    for token in tokens[:3]:
        node = tree.add(node, token, -0.1)
    outcome = verify_match(tree, lambda u: tokens[tree.depths[u]], None, {tokens[stop_offset]})
    assert outcome.emitted(tree) == tuple(tokens[: stop_offset + 1])
    assert outcome.n_accepted == stop_offset
    assert outcome.is_bonus == (stop_offset == 3)


def test_named_outcomes_of_matching() -> None:
    tree = DraftTree(0)
    a = tree.add(0, 1, -0.1)
    b = tree.add(a, 2, -0.1)
    everything = verify_match(tree, {0: 1, a: 2, b: 9}.__getitem__)
    assert everything == Acceptance((0, a, b), 9, is_bonus=True)
    nothing = verify_match(tree, {0: 4}.__getitem__)
    assert nothing == Acceptance((0,), 4, is_bonus=False)
    without_draft = verify_match(DraftTree(0), {0: 4}.__getitem__)
    assert without_draft == Acceptance((0,), 4, is_bonus=True)


def test_named_outcomes_of_rejection() -> None:
    rows, rng = np.eye(3), np.random.default_rng(0)
    tree = DraftTree(0)
    a = tree.add(0, 1, 0.0, "draft", rows[1])
    whole = verify_rejection(tree, lambda node: rows[1], rng)
    assert whole == Acceptance((0, a), 1, is_bonus=True)
    refused = verify_rejection(tree, lambda node: rows[2], rng)
    assert refused == Acceptance((0,), 2, is_bonus=False)
    limited = verify_rejection(tree, lambda node: rows[1], rng, max_tokens=1)
    assert limited == Acceptance((0,), 1, is_bonus=False)


def test_residual_of_equal_rows_is_the_target() -> None:
    p = np.array([0.1, 0.2, 0.7])
    np.testing.assert_array_equal(residual(p, p.copy()), p)
    assert accept_probability(p, p, 1) == 1.0


def test_probabilities_at_the_edges() -> None:
    p = np.array([0.0, 0.5, 0.5])
    q = np.array([0.5, 0.0, 0.5])
    assert accept_probability(p, q, 0) == 0.0
    assert accept_probability(p, q, 1) == 1.0
    assert accept_probability(p, q, 7) == 0.0  # a padding id of the draft's vocabulary
    np.testing.assert_allclose(residual(p, q), [0.0, 1.0, 0.0])


@pytest.mark.parametrize("walk", CHAIN_WALKS)
def test_draft_with_a_larger_vocabulary_stays_exact(walk) -> None:
    """Rows of q may be longer or shorter than p; a token outside p is always refused."""
    p = np.array([0.25, 0.75])
    q = np.array([0.2, 0.3, 0.5])
    mass = np.zeros(2)
    for token in range(3):
        tree = DraftTree(0)
        tree.add(0, token, float(np.log(q[token])), "draft", q)
        for outcome, weight in enumerate_outcomes(
            lambda d, tree=tree: walk(tree, lambda node: p, d)
        ):
            mass[outcome.emitted(tree)[0]] += q[token] * weight
    np.testing.assert_allclose(mass, p, atol=EXACT)


def test_sample_index_never_selects_an_impossible_token() -> None:
    probs = np.array([0.0, 0.3, 0.0, 0.7, 0.0])
    below_one = np.nextafter(1.0, 0.0)
    picks = [sample_index(probs, u) for u in (0.0, 0.29, 0.3, 0.31, 0.999, below_one)]
    assert picks == [1, 1, 3, 3, 3, 3]
    assert sample_index(np.array([0.5, 0.5 - 1e-17, 0.0]), below_one) == 1


@pytest.mark.parametrize("walk", CHAIN_WALKS)
def test_a_numpy_generator_makes_it_reproducible(walk) -> None:
    case = make_case(6, 3, seed=1, kind="random")
    tree = DraftTree(0)
    tree.add(0, 2, -1.0, "draft", case.draft(()))

    def probs(node: int) -> np.ndarray:
        return case.target(tree.tokens_on_path(node))

    runs = [walk(tree, probs, np.random.default_rng(5)) for _ in range(20)]
    assert len(set(runs)) == 1


def test_misuse_is_an_error() -> None:
    tree = DraftTree(0)
    tree.add(0, 1, -1.0)
    tree.add(0, 2, -1.0)
    for walk in CHAIN_WALKS:
        with pytest.raises(ValueError, match=f"{walk.__name__} verifies a chain, but .* branches"):
            walk(tree, lambda node: np.ones(3) / 3, np.random.default_rng(0))
        with pytest.raises(ValueError, match="at least one token"):
            walk(DraftTree(0), lambda node: np.ones(3) / 3, np.random.default_rng(0), max_tokens=0)
    with pytest.raises(ValueError, match="at least one token"):
        verify_match(tree, lambda node: 0, max_tokens=0)
