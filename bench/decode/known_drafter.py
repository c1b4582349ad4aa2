"""Drafter of known accuracy, because it knows the output: an instrument, not a method.

If every guess is right with the same probability a, independently of all others, a pass over a
chain of n draft tokens emits (1 - a^(n+1)) / (1 - a) tokens in expectation (Leviathan et al. 2023,
equation 1). With this drafter that holds by construction, so real passes of a real target show the
speedup of a pair with an acceptance rate of a.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from offload.errors import SpecdecError
from specdec.drafters.base import Drafter, TreeLimits
from specdec.verification.tree import ROOT, DraftTree


class AccuracyError(SpecdecError, ValueError):
    """Invalid probability."""


def check_accuracy(accuracy: float) -> None:
    """Raise AccuracyError unless it lies in (0, 1]."""
    if not 0.0 < accuracy <= 1.0:
        raise AccuracyError(f"an acceptance rate of {accuracy:g} is not above 0 and at most 1")


def expected_tokens(accuracy: float, n_drafted: int) -> float:
    """Return the expected tokens per pass over a chain of so many draft tokens."""
    return sum(accuracy**i for i in range(n_drafted + 1))


class KnownAccuracyDrafter(Drafter):
    """Drafter of chains of the known output; each token is wrong with probability 1 - accuracy.

    Tokens after a wrong one are never accepted, but make the pass as large as that of a real chain.

    Args:
        text_ids: the prompt and the target's output.
        accuracy: probability that a token is right, in (0, 1], independently of all others.
        n_tokens: vocabulary size, at least 2; a wrong token is any other one, equally likely.
        seed: seed of all guesses, which are drawn anew for every proposal.
    """

    def __init__(
        self, text_ids: Sequence[int], accuracy: float, n_tokens: int, seed: Sequence[int]
    ) -> None:
        check_accuracy(accuracy)
        self._text = list(text_ids)
        self._accuracy = accuracy
        self._n_tokens = n_tokens
        self._rng = np.random.default_rng(list(seed))

    def propose(self, context_ids: Sequence[int], limits: TreeLimits) -> DraftTree:
        """Return a chain as long as the limits and the known output allow.

        An unknown context has no known continuation: nothing is proposed.
        """
        tree, node = DraftTree(context_ids[-1]), ROOT
        n_known = len(context_ids)
        if list(context_ids) != self._text[:n_known]:
            return tree
        length = min(limits.max_nodes, limits.max_depth)
        for token in self._text[n_known : n_known + length]:
            node = tree.add(node, self._guess(token), math.log(self._accuracy))
        return tree

    def _guess(self, token: int) -> int:
        if self._rng.random() < self._accuracy:
            return token
        return (token + int(self._rng.integers(1, self._n_tokens))) % self._n_tokens
