"""Checks of rules and sampler against their definitions, applicable to any copy of them.

The rules as they are must pass (tests/specdec/verification/test_definitions.py), copies with a
mistake must not (tests/mutants).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from chain_checks import CASES, CAUGHT, STOPS
from exact_rules import fixed_tree_error, match_rule

from specdec.sampling.params import SamplingParams
from specdec.verification.tree import DraftTree


def match_tree() -> DraftTree:
    tree = DraftTree(0)
    first = tree.add(0, 1, -0.5)
    tree.add(0, 2, -1.0)
    second = tree.add(first, 0, -0.5)
    tree.add(first, 3, -0.9)
    tree.add(second, 2, -0.5)
    return tree


def match_is_exact(walk: Callable[..., Any]) -> bool:
    tree = match_tree()
    errors = [
        fixed_tree_error(match_rule, tree, CASES[0], walk=walk, **options)
        for options in ({}, {"max_tokens": 2}, {"stop_tokens": STOPS})
    ]
    script = (1, 0, 2, 3)  # down to the deepest leaf, and one more token
    for limit, stops, n_emitted in (
        *((limit, frozenset(), min(limit, 4)) for limit in (1, 2, 3, 4, 5)),
        (4, frozenset({0}), 2),
        (4, STOPS, 1),
    ):
        outcome = walk(tree, lambda node: script[tree.depths[node]], limit, stops)
        if outcome.emitted(tree) != script[:n_emitted] or outcome.is_bonus != (n_emitted == 4):
            return False
    return max(errors) <= CAUGHT


def lenient_is_defined(lenient: Callable[..., Any]) -> bool:
    """Compare the choice at one node with the written definition."""
    p = np.array([0.1, 0.4, 0.3, 0.2])
    for drafted in ((), (0, 3), (2, 3), (0, 2, 5), (5,), (0, 1, 2, 3)):
        tree = DraftTree(0)
        for token in drafted:
            tree.add(0, token, -1.0)
        for own in range(4):
            for threshold in (0.05, 0.2, 0.25, 0.3, 1.0):
                likely = [item for item in drafted if item < 4 and p[item] >= threshold]
                is_own = own in drafted or not likely
                expected = own if is_own else max(likely, key=lambda item: float(p[item]))
                choose = lenient(tree, lambda node, own=own: own, lambda node: p, threshold)
                if choose(0) != expected:
                    return False
    return True


class _Uniforms:
    """Stand-in for a generator that returns these numbers in turn."""

    def __init__(self, *values: float) -> None:
        self._values = iter(values)

    def random(self) -> float:
        return next(self._values)


def drawing_is_right(random_decisions: Callable[..., Any]) -> bool:
    """Check that uniform numbers on a grid select each index in exactly its share of the grid."""
    probs = np.array([0.0, 2.0, 0.0, 5.0, 1.0]) / 16.0  # sums to 1/2: a row need not be normalised
    decisions = random_decisions(_Uniforms(*np.arange(8) / 8))
    picks = [decisions.categorical(probs) for _ in range(8)]
    if picks != [1, 1, 3, 3, 3, 3, 3, 4]:
        return False
    decisions = random_decisions(_Uniforms(0.0, 0.0, 0.25, 0.75, 1.0 - 2.0**-53))
    return [decisions.bernoulli(p) for p in (0.0, 0.5, 0.5, 0.5, 1.0)] == [
        False, True, True, False, True,
    ]  # fmt: skip


def residual_is_right(residual: Callable[..., Any]) -> bool:
    p, q = np.array([0.5, 0.2, 0.3]), np.array([0.1, 0.6, 0.3])
    halved = residual(p, np.array([0.1, 0.1, 0.8]), 0.5)
    return bool(
        np.allclose(residual(p, q), [1.0, 0.0, 0.0])
        and np.allclose(halved, [1.0, 0.0, 0.0])
        and np.array_equal(residual(p, p.copy()), p)
    )


def reference_row(params: SamplingParams, prefix: tuple[int, ...], logits: np.ndarray) -> Any:
    """Return log p of the first six ids: penalty, temperature, top-k, by their definitions."""
    row = logits[:6].astype(np.float64)
    for token in set(prefix):
        row[token] *= params.repetition_penalty if row[token] < 0 else 1 / params.repetition_penalty
    if params.temperature:
        row /= params.temperature
        if params.top_k:
            row[row < np.sort(row)[-params.top_k]] = -np.inf
    peak = row.max()
    return row - peak - np.log(np.exp(row - peak).sum())


def sampler_is_defined(sampler_class: Callable[..., Any]) -> bool:
    """Compare choices and distributions with log p + g of tables, penalty, temperature and seed."""
    rng = np.random.default_rng(8)
    all_params = [
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(temperature=0.8, top_k=4, repetition_penalty=1.3, seed=5),
        SamplingParams(temperature=1.2, seed=2**63 + 1),
    ]
    for params in all_params:
        sampler = sampler_class(params, n_tokens=6)
        for position in range(2, 40):
            logits = rng.normal(size=8).astype(np.float32) * 2  # two padding rows
            logits[6:] += 5.0
            prefix = tuple(int(t) for t in rng.integers(0, 3, size=position))
            log_p = reference_row(params, prefix, logits)
            key = np.array([sampler.seed, position], dtype=np.uint64)
            noise = -np.log(-np.log(np.random.Generator(np.random.Philox(key=key)).random(6)))
            expected = int((log_p + (0.0 if params.is_greedy else noise)).argmax())
            choose = sampler.chooser(lambda node, p=prefix: p, lambda node, row=logits: row)
            if choose(0) != expected:
                return False
            p = np.eye(8)[expected] if params.is_greedy else np.append(np.exp(log_p), (0.0, 0.0))
            if not np.allclose(sampler.probs(prefix, logits), p, atol=CAUGHT):
                return False
    return True
