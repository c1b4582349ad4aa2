"""Drafts of a wished acceptance rate, to draw the curve of speed over acceptance.

The continuation is known from an earlier, plain decoding: a draft token is the right one with the
wished probability, and another one otherwise. Such drafts cost nothing, so the curve shows what
verification alone is worth.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec.api import LLM
from specdec.drafters.base import Drafter, TreeLimits
from specdec.options import RunOptions
from specdec.tree import ROOT, DraftTree


class OracleDrafter(Drafter):
    """Chains of tokens, each right with probability `rate`.

    Args:
        script: the prompt and its continuation.
        rate: of tokens whose predecessors are all right, the share that is right.
        n_tokens: real tokens of the vocabulary, two at least.
        seed: of the choices.
    """

    def __init__(self, script: Sequence[int], rate: float, n_tokens: int, seed: int = 0) -> None:
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"an acceptance rate is between 0 and 1, not {rate}")
        self._script, self._rate, self._n_tokens = list(script), rate, n_tokens
        self._rng = np.random.default_rng(seed)

    def propose(self, context_ids: Sequence[int], limits: TreeLimits) -> DraftTree:
        tree, node = DraftTree(context_ids[-1]), ROOT
        ahead = self._script[len(context_ids) :]
        for token in ahead[: min(limits.max_depth, limits.max_nodes)]:
            is_right = self._rng.random() < self._rate
            node = tree.add(node, token if is_right else (token + 1) % self._n_tokens, -0.1)
        return tree


class OracleLLM(LLM):
    """Models whose n-gram drafter can be replaced by an oracle."""

    def __init__(self, options: RunOptions) -> None:
        super().__init__(options)
        self.oracle: OracleDrafter | None = None

    def ngram_drafter(self) -> Drafter:
        return self.oracle or super().ngram_drafter()


def tokens_of_chain(rate: float, n_drafted: int) -> float:
    """Expected tokens of a pass: 1 + rate + ... + rate^n (Leviathan et al. 2023, equation 1)."""
    return sum(rate**i for i in range(n_drafted + 1))
