"""Acceptance rules with the mistakes that others shipped: the exact test must catch every one.

A test that no wrong rule can fail proves nothing; this one shows that the enumeration of
test_acceptance_exact.py has teeth.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from exact_rules import Case, fixed_tree_error, rejection_error, table_rows, top_p_rows

from specdec.acceptance import Acceptance, accept_probability, rejection_walk, residual
from specdec.tree import DraftTree

CAUGHT = 1e-6  # far above rounding, far below the error of any mutant here
_TARGET = table_rows(4, seed=31)
CASE = Case(
    vocab=4,
    depth=3,
    target=top_p_rows(_TARGET, 0.85),
    draft=table_rows(4, seed=77),
    raw_target=_TARGET,
)


def chain_rule(
    *,
    accept: Callable = accept_probability,
    recover: Callable = residual,
    row_for: Callable[[DraftTree, int, int], int] = lambda tree, node, child: node,
    bonus_row: Callable[[DraftTree, int], int] = lambda tree, node: node,
    recover_row: Callable[[DraftTree, int], int] = lambda tree, node: node,
    change_q: Callable = lambda q: q,
    use_raw: bool = False,
    one_uniform: bool = False,
) -> Callable[..., Acceptance]:
    """The rejection rule, written anew with a hook at every place where it can go wrong."""

    def rule(tree, target_probs, decisions) -> Acceptance:
        probs = target_probs.raw if use_raw else target_probs
        node, path, lowest = 0, [0], 1.0
        while tree.children(node):
            (token, child), *_ = tree.children(node).items()
            p, q = probs(row_for(tree, node, child)), change_q(tree.draft_probs[child])
            chance = accept(p, q, token)
            if one_uniform:  # u < every chance so far: the conditional chance given the past
                chance, lowest = min(chance, lowest) / lowest, min(chance, lowest)
            if not decisions.bernoulli(chance):
                rest = recover(probs(recover_row(tree, node)), q)
                return Acceptance(tuple(path), decisions.categorical(rest), is_bonus=False)
            path.append(child)
            node = child
        bonus = decisions.categorical(probs(bonus_row(tree, node)))
        return Acceptance(tuple(path), bonus, is_bonus=True)

    return rule


def unnormalised(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """(p − q)₊ as it is: an inverse-CDF sampler gives the missing mass to the last token."""
    rest = np.maximum(p - q, 0.0)
    rest[-1] += 1.0 - rest.sum()
    return rest


def bfloat16(row: np.ndarray) -> np.ndarray:
    bits = row.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def sharpened(row: np.ndarray) -> np.ndarray:
    return row**2 / (row**2).sum()


def wrong_way(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return residual(q, p)


def without_the_token(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """A recovered token from p without what q likes best: the one-hot rule used for a row."""
    rest = p.copy()
    rest[q.argmax()] = 0.0
    return rest / rest.sum() if rest.sum() > 0 else p


def last_node(tree: DraftTree, node: int) -> int:
    return len(tree) - 1


CHAIN_MUTANTS = {
    "resample from p instead of the residual": chain_rule(recover=lambda p, q: p),
    "bonus row used after a rejection": chain_rule(recover_row=last_node),
    "top-p missing on the target": chain_rule(use_raw=True),
    "off-by-one row: the child's instead of the parent's": chain_rule(
        row_for=lambda tree, node, child: child
    ),
    "off-by-one row: the row before": chain_rule(
        row_for=lambda tree, node, child: max(tree.parents[node], 0)
    ),
    "bonus in the wrong row": chain_rule(bonus_row=lambda tree, node: tree.parents[node]),
    "residual not normalised": chain_rule(recover=unnormalised),
    "one uniform for all positions": chain_rule(one_uniform=True),
    "accept whenever p >= q, refuse otherwise": chain_rule(
        accept=lambda p, q, x: float(p[x] >= q[x])
    ),
    "ratio upside down": chain_rule(accept=lambda p, q, x: min(1.0, q[x] / max(p[x], 1e-300))),
    "residual the wrong way round": chain_rule(recover=wrong_way),
    "draft row rounded to bfloat16": chain_rule(change_q=bfloat16),
    "draft row of another temperature": chain_rule(change_q=sharpened),
    "residual of a one-hot draft": chain_rule(recover=without_the_token),
    "lossy acceptance: half a chance more": chain_rule(
        accept=lambda p, q, x: min(1.0, 1.5 * accept_probability(p, q, x))
    ),
}


def test_the_rule_without_a_mistake_passes() -> None:
    assert rejection_error(chain_rule(), CASE) <= 1e-12
    assert rejection_error(rejection_walk, CASE) <= 1e-12


@pytest.mark.parametrize("name", CHAIN_MUTANTS)
def test_mutant_of_the_rejection_rule_is_caught(name: str) -> None:
    assert rejection_error(CHAIN_MUTANTS[name], CASE) > CAUGHT


def second_chance(tree, target_probs, decisions) -> Acceptance:
    """Draws again where the first draw was not drafted."""
    node, path = 0, [0]
    while True:
        token = decisions.categorical(target_probs(node))
        if token not in tree.children(node):
            token = decisions.categorical(target_probs(node))
        if token not in tree.children(node):
            return Acceptance(tuple(path), token, is_bonus=False)
        node = tree.children(node)[token]
        path.append(node)


def siblings_tried_in_turn(tree, target_probs, decisions) -> Acceptance:
    """Tries each sibling with p(x) but forgets to remove the refused ones from p."""
    node, path = 0, [0]
    while True:
        p = target_probs(node)
        for token, child in tree.children(node).items():
            if decisions.bernoulli(p[token]):
                node = child
                path.append(child)
                break
        else:
            return Acceptance(tuple(path), decisions.categorical(p), is_bonus=False)


def row_of_the_neighbour(tree, target_probs, decisions) -> Acceptance:
    """Reads the logits of the next node in the batch."""
    node, path = 0, [0]
    while True:
        row = min(node + 1, len(tree) - 1) if node else node
        token = decisions.categorical(target_probs(row))
        if token not in tree.children(node):
            return Acceptance(tuple(path), token, is_bonus=False)
        node = tree.children(node)[token]
        path.append(node)


def raw_target(tree, target_probs, decisions) -> Acceptance:
    """Forgets the processors."""
    node, path = 0, [0]
    while True:
        token = decisions.categorical(target_probs.raw(node))
        if token not in tree.children(node):
            return Acceptance(tuple(path), token, is_bonus=False)
        node = tree.children(node)[token]
        path.append(node)


@pytest.mark.parametrize(
    "rule", [second_chance, siblings_tried_in_turn, row_of_the_neighbour, raw_target]
)
def test_mutant_of_the_match_walk_is_caught(rule) -> None:
    tree = DraftTree(0)
    first = tree.add(0, 1, -0.5)
    tree.add(0, 2, -1.0)
    second = tree.add(first, 0, -0.5)
    tree.add(first, 3, -0.9)
    tree.add(second, 2, -0.5)
    assert fixed_tree_error(rule, tree, CASE) > CAUGHT
