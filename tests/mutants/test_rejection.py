"""Mistakes in the rejection rule, its draws and its residual: exact tests catch every one.

With the bugs that others shipped and those that are easily made; see `mutants`. What must fail are
the enumerations of test_acceptance_exact.py.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from chain_checks import chain_is_exact
from mutants import is_caught

from specdec.verification import acceptance

MISTAKES = {
    "resample from p instead of the residual": (
        "recovered = decisions.categorical(residual(p, q))",
        "recovered = decisions.categorical(p)",
    ),
    "row of the parent": (
        "p = target_probs(path[-1])",
        "p = target_probs(path[max(len(path)-2,0)])",
    ),
    "row of the child": (
        "p = target_probs(path[-1])",
        "p = target_probs(next(iter(tree.children(path[-1]).values()), path[-1]))",
    ),
    "always the first row": ("p = target_probs(path[-1])", "p = target_probs(0)"),
    "refused by half": (
        "decisions.bernoulli(accept_probability(p, q, token))",
        "decisions.bernoulli(0.5 * accept_probability(p, q, token))",
    ),
    "lossy: half a chance more": (
        "return min(1.0, likelihood_ratio(p, q, token))",
        "return min(1.0, 1.5 * likelihood_ratio(p, q, token))",
    ),
    "accept whenever p >= q, refuse otherwise": (
        "return min(1.0, likelihood_ratio(p, q, token))",
        "return float(likelihood_ratio(p, q, token) >= 1.0)",
    ),
    "accept with p, whatever q": (
        "return min(1.0, likelihood_ratio(p, q, token))",
        "return float(p[token])",
    ),
    "ratio upside down": ("float(p[token] / q[token])", "float(q[token] / p[token])"),
    "tokens outside the vocabulary": ("if token >= len(p) or p[token] <= 0.0:", "if False:"),
    "residual the wrong way round": (
        "rest = np.maximum(weight * p - q, 0.0)",
        "rest = np.maximum(q - weight * p, 0.0)",
    ),
    "residual of either sign": (
        "rest = np.maximum(weight * p - q, 0.0)",
        "rest = np.abs(weight * p - q)",
    ),
    "residual not normalised": ("return rest / total if total", "return rest if total"),
    "residual divides by nothing": ("if total > np.finfo(np.float64).eps else p", ""),
    "draft row in half precision": (
        "q[:shared] = row[:shared]",
        "q[:shared] = row[:shared].astype(np.float16)",
    ),
    "draft row shifted by one": ("q[:shared] = row[:shared]", "q[1:shared] = row[: shared - 1]"),
    "goes on behind a stop token": ("return token in stops or (", "return ("),
    "one token too many": ("n_emitted >= max_tokens", "n_emitted > max_tokens"),
    "the last token wanted is emitted twice": (
        "return Acceptance(tuple(path), token, is_bonus=False)",
        "return Acceptance((*path, child), token, is_bonus=False)",
    ),
    "a bonus is called recovered": (
        "return Acceptance(tuple(path), decisions.categorical(p), is_bonus=True)",
        "return Acceptance(tuple(path), decisions.categorical(p), is_bonus=False)",
    ),
    "drawing: tokens of probability 0": ('side="right"', 'side="left"'),
    "drawing: as if normalised": ("uniform * cumulative[-1]", "uniform"),
    "drawing: the other outcome": ("self._rng.random() < p", "self._rng.random() >= p"),
    "drawing: what cannot happen": ("self._rng.random() < p", "self._rng.random() <= p"),
}


class _Uniforms:
    """Stands for a generator: gives these numbers in turn."""

    def __init__(self, *values: float) -> None:
        self._values = iter(values)

    def random(self) -> float:
        return next(self._values)


def drawing_is_right(module: ModuleType) -> bool:
    """Uniform numbers on a grid select each index in exactly its share of the grid."""
    probs = np.array([0.0, 2.0, 0.0, 5.0, 1.0]) / 16.0  # sums to 1/2: a row need not be normalised
    decisions = module.RandomDecisions(_Uniforms(*np.arange(8) / 8))
    picks = [decisions.categorical(probs) for _ in range(8)]
    if picks != [1, 1, 3, 3, 3, 3, 3, 4]:
        return False
    decisions = module.RandomDecisions(_Uniforms(0.0, 0.0, 0.25, 0.75, 1.0 - 2.0**-53))
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


def rule_is_right(module: ModuleType) -> bool:
    return (
        drawing_is_right(module)
        and residual_is_right(module.residual)
        and chain_is_exact(module.rejection_walk)
    )


def test_the_source_without_a_mistake_passes() -> None:
    assert rule_is_right(acceptance)


@pytest.mark.parametrize("name", MISTAKES)
def test_mutant_is_caught(name: str) -> None:
    assert is_caught(acceptance, MISTAKES[name], rule_is_right)
