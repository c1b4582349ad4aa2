"""Block verification accepts at least as much as rejection, in expectation and exactly."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from exact_rules import (
    KINDS,
    Case,
    chain_error,
    chain_of,
    expected_accepted,
    make_case,
    outcomes,
    table_rows,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.verification.acceptance import verify_rejection
from specdec.verification.block import verify_block
from specdec.verification.tree import DraftTree

EXACT = 1e-12


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Tables p and q, flat or peaked, with tokens that one or both rule out."""
    vocab, depth = draw(st.sampled_from([(2, 1), (2, 4), (3, 3), (4, 2)]))
    seeds = st.integers(0, 2**32)
    shapes = {
        "concentration": draw(st.sampled_from([0.2, 0.7, 5.0])),
        "zeros": draw(st.sampled_from([0.0, 0.4])),
    }
    target = table_rows(vocab, draw(seeds), **shapes)
    return Case(vocab, depth, target, table_rows(vocab, draw(seeds), **shapes))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_it_is_exact_and_never_accepts_less_than_rejection(case: Case) -> None:
    assert chain_error(verify_block, case) <= EXACT
    assert (
        expected_accepted(verify_block, case) >= expected_accepted(verify_rejection, case) - EXACT
    )


def expected_by_the_papers_formula(case: Case) -> float:
    """Return the sum over i of E[pᵢ], the chance of at least i accepted tokens (paper's lemma)."""
    total = 0.0
    for length in range(1, case.depth + 1):
        for tokens in itertools.product(range(case.vocab), repeat=length):
            chance = weight = 1.0
            for i, token in enumerate(tokens):
                p, q = case.target(tokens[:i])[token], case.draft(tokens[:i])[token]
                chance *= q
                weight = min(weight * p / q, 1.0) if q > 0.0 else 0.0
            total += chance * weight
    return total


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "depth"), [(2, 3), (4, 3), (8, 2)])
def test_expected_length_is_the_papers(vocab: int, depth: int, kind: str) -> None:
    case = make_case(vocab, depth, seed=vocab + depth, kind=kind)
    expected = expected_by_the_papers_formula(case)
    assert expected_accepted(verify_block, case) == pytest.approx(expected, abs=EXACT)


def test_example_of_the_paper() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3), two tokens: 10/9 accepted by rejection, 11/9 as a block."""
    p, q = np.array([1.0, 2.0]) / 3.0, np.array([2.0, 1.0]) / 3.0
    case = Case(2, 2, lambda prefix: p, lambda prefix: q)
    assert expected_accepted(verify_rejection, case) == pytest.approx(10 / 9, abs=EXACT)
    assert expected_accepted(verify_block, case) == pytest.approx(11 / 9, abs=EXACT)


def test_one_token_is_the_rejection_rule() -> None:
    case = make_case(5, 1, seed=3, kind="random")
    for token in range(5):
        tree = chain_of((token,), case.draft)
        block, rejection = (
            sorted(
                (item.emitted(tree), round(weight, 12))
                for item, weight in outcomes(walk, tree, case)
            )
            for walk in (verify_block, verify_rejection)
        )
        assert block == rejection


def test_a_draft_that_is_the_target_is_accepted_whole() -> None:
    case = make_case(4, 3, seed=2, kind="same")
    assert expected_accepted(verify_block, case) == pytest.approx(3.0, abs=EXACT)
    tree = chain_of((1, 2, 0), case.draft)
    assert {item.n_accepted for item, _ in outcomes(verify_block, tree, case)} == {3}
    assert all(item.is_bonus for item, _ in outcomes(verify_block, tree, case))


def test_nothing_behind_an_impossible_token_is_computed() -> None:
    """No row is computed after the last acceptable token, nor behind a stop token."""
    p = np.array([0.5, 0.5, 0.0])
    q = np.array([0.2, 0.2, 0.6])
    asked: list[int] = []

    def target_probs(node: int) -> np.ndarray:
        asked.append(node)
        return p

    tree = chain_of((0, 2, 1, 0), lambda prefix: q)
    outcome = verify_block(tree, target_probs, np.random.default_rng(0))
    assert outcome.n_accepted <= 1
    assert sorted(set(asked)) == [0, 1]
    asked.clear()
    outcome = verify_block(tree, target_probs, np.random.default_rng(0), stop_tokens=frozenset({0}))
    assert asked == [0]
    assert outcome.emitted(tree) == (0,)


def test_named_outcomes() -> None:
    p = np.array([0.5, 0.5])
    tree = chain_of((0, 1), lambda prefix: p)
    whole = verify_block(tree, lambda node: p, np.random.default_rng(0))
    assert (whole.path, whole.is_bonus) == ((0, 1, 2), True)
    limited = verify_block(tree, lambda node: p, np.random.default_rng(0), max_tokens=2)
    assert (limited.path, limited.next_token, limited.is_bonus) == ((0, 1), 1, False)
    alone = verify_block(DraftTree(0), lambda node: np.array([0.0, 1.0]), np.random.default_rng(0))
    assert (alone.path, alone.next_token, alone.is_bonus) == ((0,), 1, True)
    refused = verify_block(tree, lambda node: np.array([0.0, 1.0]), np.random.default_rng(0))
    assert (refused.path, refused.next_token, refused.is_bonus) == ((0,), 1, False)
    with pytest.raises(ValueError, match="at least one token"):
        verify_block(tree, lambda node: p, np.random.default_rng(0), max_tokens=0)
