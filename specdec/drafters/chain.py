"""DrawnChain: draft tokens that are drawn, for the rules that verify one chain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.sampling.sampler import Sampler
from specdec.verification.acceptance import sample_index
from specdec.verification.tree import ROOT, DraftTree


class DrawnChain:
    """A chain that grows by tokens drawn from q, the draft's distribution after the sampler's
    processors.

    Args:
        context_ids: prompt and emitted tokens; the last one is the tree's root.
        n_tokens: size of the target's vocabulary; the draft's ids beyond it are never drawn.
        rng: source of the draws.
    """

    def __init__(
        self,
        context_ids: Sequence[int],
        n_tokens: int,
        sampler: Sampler,
        rng: np.random.Generator,
    ) -> None:
        self.tree = DraftTree(context_ids[-1])
        self._prefix, self._n_tokens = list(context_ids), n_tokens
        self._sampler, self._rng = sampler, rng
        self._end = ROOT

    def draw(self, row: NDArray[np.float32]) -> bool:
        """Add a token by the draft's logits [vocab]; return whether others may follow it."""
        q = self._sampler.probs(self._prefix, row[: self._n_tokens])
        token = sample_index(q, self._rng.random())
        self._end = self.tree.add(self._end, token, float(np.log(q[token])), draft_probs=q)
        self._prefix.append(token)
        # A stop token ends the sequence: nothing can be accepted after it.
        return token not in self._sampler.stop_tokens

    @property
    def token_ids(self) -> list[int]:
        """Tokens drawn so far."""
        return self.tree.token_ids[ROOT + 1 :]
