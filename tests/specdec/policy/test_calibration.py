"""Acceptance probabilities: q until there is evidence, then the observed rate."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.policy.assumptions import ASSUMED_LEVEL_ACCEPTANCE
from specdec.policy.calibration import (
    Calibration,
    chain_acceptance_rate,
    depth_gain,
    min_level_probability,
    note_chain,
    note_levels,
)
from specdec.verification.tree import DraftTree


def chain(*qs: float, source: str = "draft") -> DraftTree:
    tree, node = DraftTree(0), 0
    for i, q in enumerate(qs):
        node = tree.add(node, i, math.log(q), source)
    return tree


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def test_a_draft_is_believed_before_anything_is_seen() -> None:
    tree = chain(0.9, 0.5, 0.2)
    assert Calibration().path_probabilities(tree) == pytest.approx([1.0, 0.9, 0.45, 0.09])


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    tree = DraftTree(0)
    for _ in range(draw(st.integers(0, 12))):
        parent = draw(st.integers(0, len(tree) - 1))
        q = draw(st.sampled_from([0.0, 1e-12, 0.01, 0.4, 0.99, 1.0]))
        log_q = math.log(q) if q else -math.inf
        tree.add(parent, draw(st.integers(0, 3)), log_q, draw(st.sampled_from(["draft", "ngram"])))
    return tree


@given(st.lists(st.tuples(trees(), st.lists(st.integers(0, 3), min_size=1, max_size=5))), trees())
def test_probabilities_fall_along_every_path_whatever_was_seen(seen, tree: DraftTree) -> None:
    calibration = Calibration()
    for observed, emitted in seen:
        calibration.observe(observed, emitted)
    actual = calibration.path_probabilities(tree)
    assert actual[0] == 1.0
    for i in range(1, len(tree)):
        assert 0.0 < actual[i] < actual[tree.parents[i]]


@pytest.mark.parametrize(("sharpness", "bias"), [(0.5, -1.0), (1.5, 1.0), (0.3, -3.0)])
def test_a_wrong_draft_is_corrected(sharpness: float, bias: float) -> None:
    """Chains of known truth: predictions for new ones are right on average, at each depth."""
    rng = np.random.default_rng(3)
    calibration = Calibration()
    predicted, happened = np.zeros(3), np.zeros(3)
    for i in range(1500):
        logits = rng.normal(1.0, 1.5, size=3)
        tree = chain(*(sigmoid(x) for x in logits))
        reached, n = True, 0
        for x in logits:
            reached = reached and rng.random() < sigmoid(sharpness * x + bias)
            n += reached
        if i >= 500:
            predicted += calibration.path_probabilities(tree)[1:]
            happened += np.arange(3) < n
        calibration.observe(tree, [*range(n), 99])
    assert predicted / 1000 == pytest.approx(happened / 1000, abs=0.03)


def test_nodes_that_were_not_reached_teach_nothing() -> None:
    calibration, tree = Calibration(), chain(0.9, 0.9, 0.9)
    calibration.observe(tree, [7])  # only the first one was verified
    only_first = Calibration()
    only_first.observe(chain(0.9), [7])
    assert list(calibration.path_probabilities(tree)) == list(only_first.path_probabilities(tree))


def test_sources_have_separate_statistics_and_old_ones_fade() -> None:
    calibration = Calibration()
    for _ in range(300):
        calibration.observe(chain(0.8), [7])
    assert calibration.path_probabilities(chain(0.8))[1] < 0.05
    assert calibration.path_probabilities(chain(0.8, source="ngram"))[1] == pytest.approx(0.8)
    for _ in range(300):
        calibration.observe(chain(0.8), [0])
    assert calibration.path_probabilities(chain(0.8))[1] > 0.7


def test_survival_of_chains_is_their_share() -> None:
    survival = chain_acceptance_rate()
    assert survival.means == pytest.approx((ASSUMED_LEVEL_ACCEPTANCE,))
    rng = np.random.default_rng(0)
    for _ in range(2000):
        n = next((i for i in range(4) if rng.random() > 0.6), 4)
        note_chain(survival, 4, n)
    assert survival.means[0] == pytest.approx(0.6, abs=0.06)


def test_levels_are_worth_what_such_ones_gained() -> None:
    levels = depth_gain()
    assert min_level_probability(levels, 0.3) == pytest.approx(0.3)  # as predicted by the draft
    assert min_level_probability(levels, 7.0) == 1.0  # below the lowest level of a tree
    for _ in range(40):
        note_levels(levels, np.array([0.9, 0.6, 0.3]), np.array([0.45, 0.3, 0.15]))
        note_levels(levels, np.array([]), np.array([]))  # a tree of one level is no evidence
    assert min_level_probability(levels, 0.3) == pytest.approx(0.6, rel=0.01)


def test_each_bucket_is_learnt_for_itself() -> None:
    """Likely nodes are no evidence about unlikely ones."""
    calibration = Calibration()
    for _ in range(60):
        calibration.observe(chain(0.8), [7])
        calibration.observe(chain(0.5), [0])
    assert calibration.path_probabilities(chain(0.3))[1] == pytest.approx(0.3)
    assert calibration.path_probabilities(chain(0.8))[1] < 0.2
    assert calibration.path_probabilities(chain(0.5))[1] > 0.8
