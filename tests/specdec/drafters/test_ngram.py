from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.drafters import NgramDrafter, TreeLimits
from specdec.drafters.ngram import MAX_OCCURRENCES, NgramIndex
from specdec.verification.acceptance import Acceptance, verify_match
from specdec.verification.tree import DraftTree

LIMITS = TreeLimits(max_nodes=32, max_depth=8, width=4)
CHAIN = TreeLimits(max_nodes=8, max_depth=8, width=1)


def branches(tree: DraftTree) -> set[tuple[int, ...]]:
    """Return the tokens from below the root to every leaf."""
    return {tree.tokens_on_path(i) for i in range(1, len(tree)) if not tree.children(i)}


def true_continuation(tree: DraftTree, tokens: list[int]) -> Acceptance:
    """Return the outcome of a step in which the target emits `tokens`."""
    return verify_match(tree, lambda node: tokens[tree.depths[node]])


contexts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


@settings(deadline=None)
@given(contexts, st.integers(1, 4))
def test_index_finds_every_earlier_occurrence(context: list[int], n: int) -> None:
    index = NgramIndex(4)
    index.extend(context)
    suffix = context[len(context) - n :]
    expected = [
        p for p in range(len(context) - 1, n - 1, -1) if context[p - n : p] == suffix
    ] if n <= len(context) else []  # fmt: skip
    assert index.occurrences(n) == expected[:MAX_OCCURRENCES]


@settings(deadline=None)
@given(contexts, contexts)
def test_extending_in_steps_equals_indexing_at_once(first: list[int], more: list[int]) -> None:
    stepwise, at_once = NgramIndex(3), NgramIndex(3)
    stepwise.extend(first)
    assert stepwise.is_extended_by(first + more)
    stepwise.extend(first + more)
    at_once.extend(first + more)
    assert all(stepwise.occurrences(n) == at_once.occurrences(n) for n in (1, 2, 3))


@settings(deadline=None)
@given(contexts, st.integers(0, 20), st.integers(0, 6), st.integers(1, 4))
def test_proposals_keep_their_limits(
    context: list[int], max_nodes: int, max_depth: int, width: int
) -> None:
    tree = NgramDrafter().propose(context, TreeLimits(max_nodes, max_depth, width))
    assert tree.token_ids[0] == context[-1]
    assert tree.n_drafted <= max_nodes
    assert max(tree.depths) <= max_depth
    assert all(len(tree.children(i)) <= width for i in range(len(tree)))
    assert all(math.isfinite(p) and p < 0 for p in tree.log_probs[1:])
    assert set(tree.sources[1:]) <= {("ngram",)}
    for node in range(len(tree)):
        assert sum(math.exp(tree.log_probs[c]) for c in tree.children(node).values()) < 1.0 + 1e-9


def test_no_repetition_no_proposal() -> None:
    tree = NgramDrafter().propose([1, 2, 3, 4], LIMITS)
    assert tree.n_drafted == 0


def test_continuation_of_the_longest_match() -> None:
    context = [1, 2, 3, 7, 8, 9, 3, 5, 1, 2, 3]
    tree = NgramDrafter().propose(context, CHAIN)
    assert tree.is_chain
    assert tree.tokens_on_path(len(tree) - 1)[:3] == (7, 8, 9)


def test_several_continuations_are_branches_the_recent_one_first() -> None:
    context = [1, 2, 7, 1, 2, 8, 1, 2]
    tree = NgramDrafter().propose(context, LIMITS)
    assert list(tree.children(0)) == [8, 7]
    assert tree.log_probs[tree.children(0)[8]] > tree.log_probs[tree.children(0)[7]]


def test_frequent_continuations_are_more_probable() -> None:
    context = [1, 2, 8, 0, 1, 2, 8, 0, 1, 2, 8, 0, 1, 2, 7, 0, 1, 2]
    tree = NgramDrafter().propose(context, LIMITS)
    assert tree.log_probs[tree.children(0)[8]] > tree.log_probs[tree.children(0)[7]]


def test_common_beginnings_are_shared() -> None:
    context = [1, 2, 5, 6, 1, 2, 5, 7, 1, 2]
    tree = NgramDrafter().propose(context, TreeLimits(8, 2, 4))
    assert list(tree.children(0)) == [5]
    assert set(tree.children(tree.children(0)[5])) == {6, 7}


def test_a_shorter_match_fills_what_the_longest_leaves_open() -> None:
    context = [1, 2, 7, 0, 9, 2, 8, 0, 1, 2]  # "1 2" -> 7, "2" alone also -> 8
    tree = NgramDrafter().propose(context, LIMITS)
    assert set(tree.children(0)) == {7, 8}
    assert tree.log_probs[tree.children(0)[7]] > tree.log_probs[tree.children(0)[8]]


def test_a_period_is_continued_beyond_the_end() -> None:
    tree = NgramDrafter().propose([1, 2, 3] * 3, CHAIN)
    assert tree.token_ids[1:] == [1, 2, 3, 1, 2, 3, 1, 2]


def test_context_that_is_no_extension_starts_afresh() -> None:
    drafter = NgramDrafter()
    drafter.propose([1, 2, 3, 1, 2], LIMITS)
    assert drafter.propose([5, 6, 1, 2], LIMITS).n_drafted == 0
    assert drafter.propose([1, 2], LIMITS).n_drafted == 0  # shorter: a rollback
    drafter.reset()
    assert drafter.propose([3, 1, 2], LIMITS).n_drafted == 0


def test_confidence_follows_what_is_observed() -> None:
    drafter = NgramDrafter()
    context = [1, 2, 3, 4, 5, 1, 2, 3, 4]
    before = drafter.confidence(4)
    for _ in range(40):
        tree = drafter.propose(context, LIMITS)
        drafter.observe(true_continuation(tree, [9] * 20), tree)
    wrong = drafter.confidence(4)
    assert wrong < 0.3 < before
    assert wrong < drafter.propose(context, LIMITS).n_drafted
    for _ in range(200):
        tree = drafter.propose(context, LIMITS)
        drafter.observe(true_continuation(tree, [5, 1, 2, 3, 4] * 4), tree)
    assert drafter.confidence(4) > 0.7


def test_observing_a_merged_or_cut_tree_learns_from_the_tokens() -> None:
    drafter = NgramDrafter()
    drafter.propose([1, 2, 3, 4, 5, 1, 2, 3, 4], LIMITS)
    other = DraftTree(4)
    five = other.add(0, 5, -0.1, "draft")
    before = drafter.confidence(4)
    drafter.observe(Acceptance((0, five), 9, is_bonus=True), other)
    assert drafter.confidence(4) > before
    after = drafter.confidence(4)
    drafter.observe(Acceptance((0, five), 9, is_bonus=True), other)  # nothing proposed since
    assert drafter.confidence(4) == after


def test_repetitive_text_is_drafted_well() -> None:
    rng = np.random.default_rng(0)
    phrase = rng.integers(0, 1000, size=40).tolist()
    token_ids = [*phrase, 5000, *phrase, 5001, *phrase]
    drafter, done, passes = NgramDrafter(), 50, 0
    while done < len(token_ids):
        tree = drafter.propose(token_ids[:done], LIMITS)
        rest = [*token_ids[done:], *[7] * 20]
        outcome = true_continuation(tree, rest)
        drafter.observe(outcome, tree)
        done += outcome.n_accepted + 1
        passes += 1
    assert (len(token_ids) - 50) / passes > 4.0


def test_misuse_is_an_error() -> None:
    with pytest.raises(ValueError, match="max_ngram"):
        NgramDrafter(0)
    with pytest.raises(ValueError, match="limits"):
        TreeLimits(1, 1, 0)


def test_a_long_run_of_hits_leaves_some_doubt() -> None:
    """Thousands of hits round the estimate to 1; its uncertainty has no finite logarithm."""
    drafter = NgramDrafter()
    context = [1, 2, 3, 4] * 20
    for _ in range(3000):
        tree = drafter.propose(context, TreeLimits(8, 8, 4))
        path = tree.path(tree.best_indices(tree.n_drafted)[-1])
        drafter.observe(Acceptance(path, 9, is_bonus=True), tree)
    assert 0.9 < drafter.confidence(8) < 1.0
    assert drafter.propose(context, TreeLimits(8, 8, 4)).n_drafted > 0
