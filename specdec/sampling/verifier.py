"""Verifier: apply a sequence's acceptance rule to a scored tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from specdec.config import SpecConfig
from specdec.sampling.sampler import Sampler
from specdec.verification.acceptance import Acceptance, lenient, verify_match, verify_rejection
from specdec.verification.block import verify_block
from specdec.verification.tree import DraftTree

ChainRule = Callable[..., Acceptance]
_CHAIN_RULES: dict[str, ChainRule] = {"rejection": verify_rejection, "block": verify_block}


class Verifier:
    """Accepts draft tokens that the target agrees with, by the configured rule.

    Args:
        sampler: chooses the target's token from a row of logits.
        spec: has the acceptance rule.
        rng: random numbers of the chain rules; the match rule needs none.
    """

    def __init__(
        self, sampler: Sampler, spec: SpecConfig, rng: np.random.Generator | None = None
    ) -> None:
        self._sampler, self.rng = sampler, rng
        self._accept_threshold = spec.accept_threshold
        if spec.acceptance == "match":
            self._rule: ChainRule = self._match
        else:
            self._rule = partial(self._decide, _CHAIN_RULES[spec.acceptance])

    def verify(
        self,
        tree: DraftTree,
        logits: NDArray[np.float32],
        context_ids: Sequence[int],
        max_tokens: int,
    ) -> Acceptance:
        """Accept a path of the tree: between 1 and `max_tokens` new tokens.

        logits: float32 [nodes, vocab], after each node of the tree.
        context_ids: all tokens up to the tree's root.
        """
        return self._rule(tree, logits, context_ids, max_tokens)

    def _match(
        self,
        tree: DraftTree,
        logits: NDArray[np.float32],
        context_ids: Sequence[int],
        max_tokens: int,
    ) -> Acceptance:
        sampler = self._sampler
        choose = sampler.chooser(lambda node: _prefix(context_ids, tree, node), logits.__getitem__)
        if self._accept_threshold is not None:

            def target_probs(node: int) -> NDArray[np.float64]:
                return np.exp(sampler.log_probs(_prefix(context_ids, tree, node), logits[node]))

            choose = lenient(tree, choose, target_probs, self._accept_threshold)
        return verify_match(tree, choose, max_tokens, sampler.stop_tokens)

    def _decide(
        self,
        walk: ChainRule,
        tree: DraftTree,
        logits: NDArray[np.float32],
        context_ids: Sequence[int],
        max_tokens: int,
    ) -> Acceptance:
        assert self.rng is not None, "the chain rules draw random numbers"

        def target_probs(node: int) -> NDArray[np.float64]:
            return self._sampler.probs(_prefix(context_ids, tree, node), logits[node])

        return walk(tree, target_probs, self.rng, max_tokens, self._sampler.stop_tokens)


def _prefix(context_ids: Sequence[int], tree: DraftTree, node: int) -> list[int]:
    """Return all tokens up to and including `node`."""
    return [*context_ids, *tree.tokens_on_path(node)]
