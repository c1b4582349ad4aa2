"""TreeShape: limits of one sequence's draft tree, and the gain of its levels.

With the throughput price λ a node gains its probability P of being accepted, and costs λ times the
seconds that it adds. Everything here follows from that difference. The nodes of a pass are chosen
for all sequences together (specdec.policy.shared_pass).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from specdec.config import SpecConfig
from specdec.drafters.base import TreeLimits
from specdec.policy.calibration import min_level_probability, note_levels
from specdec.policy.cost_model import runs_of_levels
from specdec.policy.modes import DraftChoice
from specdec.policy.pair_statistics import AcceptanceStatistics, PairStatistics
from specdec.policy.shared_pass import CandidateTree
from specdec.verification.tree import DRAFT_SOURCE, ROOT, DraftTree

_FIRST_LEVEL_WEIGHT = 0.25
"""Weight of the first level's gain beside those of further ones, which are smaller
(bench/scenarios: with 1, 0.94 of the speed where one level is best)."""


class TreeShape:
    """Limits and trimming of trees by measured costs and acceptance.

    Args:
        config: options that the user fixed.
        pair_statistics: seconds of passes and drafting.
        acceptance_statistics: acceptance in this mode of choosing tokens.
        has_model: whether one of the drafters is a model, whose runs take time.
    """

    def __init__(
        self,
        config: SpecConfig,
        pair_statistics: PairStatistics,
        acceptance_statistics: AcceptanceStatistics,
        has_model: bool,
    ) -> None:
        self._config = config
        self._pair_statistics, self._cost = pair_statistics, pair_statistics.cost
        self._acceptance_statistics = acceptance_statistics
        self._has_model = has_model
        self._num_seqs = 1

    def limits(self, limit: int, depth: int, uses_draft: bool, num_seqs: int = 1) -> TreeLimits:
        """Return the limits of a proposal of at most `limit` nodes and `depth` levels.

        num_seqs: sequences that share the step's drafting and its pass.
        """
        self._num_seqs = num_seqs
        limit = min(limit, self._acceptance_statistics.n_candidates)
        if self._config.acceptance != "match":
            return TreeLimits(self._chain_length(min(limit, depth), uses_draft), depth, 1)
        minimum = self._min_level_probability(uses_draft)
        return TreeLimits(limit, depth, self._config.width, minimum)

    def candidate_tree(self, tree: DraftTree) -> CandidateTree:
        """Return a proposal with its acceptance probabilities and throughput price."""
        probs = self._acceptance_statistics.calibration.path_probabilities(tree)
        return CandidateTree(tree, probs, self._choice.rate)

    def cut(
        self, candidate_tree: CandidateTree, indices: list[int], price: float, uses_draft: bool
    ) -> DraftTree:
        """Return the nodes of a candidate tree to verify, where one more would cost `price`."""
        tree, n_drafted = candidate_tree.tree, len(indices) - 1
        self._acceptance_statistics.observe_tree_size(n_drafted)
        if uses_draft and tree.n_drafted:
            self._note_levels(tree, np.maximum(candidate_tree.probabilities - price, 0.0))
        return tree if n_drafted == tree.n_drafted else tree.subset(indices)

    def min_draft_seconds(self, num_seqs: int) -> float:
        """Return the seconds that one level and one node of a sequence add to a step without the
        draft: its share of the drafting, and the time of one more token."""
        seconds = self._cost.table(num_seqs + 1)[num_seqs - 1 :]
        return self._pair_statistics.draft_pass_seconds / num_seqs + max(
            0.0, float(seconds[-1] - seconds[0])
        )

    @property
    def _level_seconds(self) -> float:
        """Seconds of a sequence's share of a run of the draft."""
        return self._pair_statistics.draft_pass_seconds / self._num_seqs

    @property
    def _choice(self) -> DraftChoice:
        return self._acceptance_statistics.choice(self._num_seqs)

    def _min_level_probability(self, uses_draft: bool) -> float:
        """Return the minimum draft probability of a level for one more run of the draft to pay.

        It is uncalibrated, as the drafter knows only that while it grows the tree. The first run of
        a step that uses the draft is always allowed. Only runs before the pass count, which are not
        hidden: nodes drafted ahead are not run again.
        """
        if not self._has_model:
            return 0.0
        if not uses_draft:
            return math.inf  # not even the root's level, whose probability is 1
        if self._config.draft_depth is not None:
            return 0.0
        min_gain = self._choice.rate * self._level_seconds
        return min_level_probability(self._acceptance_statistics.levels, min_gain)

    def _chain_length(self, limit: int, uses_draft: bool) -> int:
        """Return the length of a chain to draw, from the acceptance of earlier chains alone.

        Its own tokens must not count: dropping a drawn token that looks unlikely leaves a sample
        that is no longer q's, and the rules are exact for q only.
        """
        if limit < 1:
            return 0
        tokens = np.cumsum(self._acceptance_statistics.chain.means[0] ** np.arange(limit + 1))
        seconds = self._cost.table(self._num_seqs + limit)[self._num_seqs - 1 :]
        tokens = tokens[: len(seconds)]
        if uses_draft:
            block_size = self._pair_statistics.block_size
            n_runs = [runs_of_levels(depth, block_size) for depth in range(len(seconds))]
            seconds = seconds + self._level_seconds * np.array(n_runs)
        values = tokens - self._choice.rate * seconds
        # A step without draft tokens is no evidence about the draft.
        minimum = 1 if uses_draft else 0
        return minimum + int(values[minimum:].argmax())

    def _note_levels(self, tree: DraftTree, gains: NDArray[np.float64]) -> None:
        """Record the gain of each of the model's levels, in tokens, net of their price, beside the
        probability of the level above. Nodes that others propose too count in neither."""
        depths = np.array(tree.depths)
        is_drafted = np.array([DRAFT_SOURCE in sources for sources in tree.sources])
        is_new = np.array([sources == (DRAFT_SOURCE,) for sources in tree.sources])
        # A first level that others propose too shows nothing of a run at the root.
        is_new[ROOT] = is_new[depths == 1].all()
        deepest = int(depths[is_drafted].max(initial=0))
        gained = np.bincount(depths, weights=is_new * gains).astype(np.float64)
        probabilities = is_new * np.exp(tree.path_log_probs)
        draft = np.bincount(depths, weights=probabilities).astype(np.float64)
        # A tree of one level shows what that one gains: without it, few levels would stay few.
        first, weight = (1, 1.0) if deepest > 1 else (0, _FIRST_LEVEL_WEIGHT)
        draft, gained = draft[first:deepest], gained[first + 1 : deepest + 1]
        note_levels(self._acceptance_statistics.levels, draft, gained, weight)
