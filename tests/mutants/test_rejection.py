"""Mistakes in the rejection rule, its draws and its residual: the checks catch every one.

With the bugs that others shipped and those that are easily made; see `mutants`.
"""

from __future__ import annotations

from types import ModuleType

import pytest
from chain_checks import chain_is_exact
from definitions import drawing_is_right, residual_is_right
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


def rule_is_right(module: ModuleType) -> bool:
    return (
        drawing_is_right(module.RandomDecisions)
        and residual_is_right(module.residual)
        and chain_is_exact(module.rejection_walk)
    )


@pytest.mark.parametrize("name", MISTAKES)
def test_mutant_is_caught(name: str) -> None:
    assert is_caught(acceptance, MISTAKES[name], rule_is_right)
