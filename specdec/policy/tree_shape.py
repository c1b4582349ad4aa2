"""The shape of one text's tree: how far to grow it, and what a part of it is worth.

With λ tokens per second a node is worth its probability P of being accepted, and costs λ times the
seconds that it adds. Everything here follows from that difference. Which nodes share a pass is
decided for all sequences together (specdec.policy.shared_pass).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from specdec.config import SpecConfig
from specdec.drafters.base import TreeLimits
from specdec.policy.acceptance_statistics import AcceptanceStatistics, ModeStatistics
from specdec.policy.calibration import note_levels, worthwhile_level
from specdec.policy.modes import DraftChoice
from specdec.policy.shared_pass import CandidateTree
from specdec.verification.tree import DRAFT_SOURCE, DraftTree


class TreeShape:
    """Shapes trees from what is known of costs and of acceptance.

    Args:
        config: what the user fixed.
        experience: how long passes and drafting take.
        lessons: how often such drafts are accepted.
        has_model: whether one of the drafters is a model, whose runs take time.
    """

    def __init__(
        self,
        config: SpecConfig,
        acceptance_statistics: AcceptanceStatistics,
        mode_statistics: ModeStatistics,
        has_model: bool,
    ) -> None:
        self._config = config
        self._acceptance_statistics, self._cost = acceptance_statistics, acceptance_statistics.cost
        self._mode_statistics = mode_statistics
        self._has_model = has_model
        self._num_seqs = 1

    def limits(self, limit: int, depth: int, uses_draft: bool, num_seqs: int = 1) -> TreeLimits:
        """Of a proposal that may have at most so many nodes and levels.

        n_texts: that share the step's drafting and its pass.
        """
        self._num_seqs = num_seqs
        limit = min(limit, self._mode_statistics.n_candidates)
        if self._config.acceptance != "match":
            return TreeLimits(self._chain_length(min(limit, depth), uses_draft), depth, 1)
        minimum = self._min_level_probability(uses_draft)
        return TreeLimits(limit, depth, self._config.width, minimum)

    def candidate_tree(self, tree: DraftTree) -> CandidateTree:
        """A tree as it is weighed against those of other sequences."""
        probs = self._mode_statistics.calibration.path_probabilities(tree)
        return CandidateTree(tree, probs, self._choice.rate)

    def cut(
        self, candidate_tree: CandidateTree, cached: list[int], price: float, uses_draft: bool
    ) -> DraftTree:
        """The part of an offer that is verified, where one more node would cost `price`."""
        tree, num_retained = candidate_tree.tree, len(cached) - 1
        self._mode_statistics.note_retained(num_retained)
        if uses_draft and tree.n_drafted:
            self._note_levels(tree, np.maximum(candidate_tree.probabilities - price, 0.0))
        return tree if num_retained == tree.n_drafted else tree.subset(cached)

    def min_draft_seconds(self, num_seqs: int) -> float:
        """What one level and one node of a text add to a step without the draft: its share of the
        drafting, and the time that its row takes."""
        seconds = self._cost.table(num_seqs + 1)[num_seqs - 1 :]
        return self._acceptance_statistics.run_seconds / num_seqs + max(
            0.0, float(seconds[-1] - seconds[0])
        )

    @property
    def _level_seconds(self) -> float:
        """A text's share of a run of the draft."""
        return self._acceptance_statistics.run_seconds / self._num_seqs

    @property
    def _choice(self) -> DraftChoice:
        return self._mode_statistics.choice(self._num_seqs)

    def _min_level_probability(self, uses_draft: bool) -> float:
        """Draft probability of a level from which on one more run of the draft is worth its time.

        In terms of the uncalibrated probabilities that the drafter knows while it grows the tree.
        The first run of a step that uses the draft is never refused. The runs that this is about
        are those before the pass, which nothing hides: what was drafted ahead is not run again.
        """
        if not self._has_model:
            return 0.0
        if not uses_draft:
            return math.inf  # not even the root's level, whose probability is 1
        if self._config.draft_depth is not None:
            return 0.0
        worth = self._choice.rate * self._level_seconds
        return worthwhile_level(self._mode_statistics.levels, worth)

    def _chain_length(self, limit: int, uses_draft: bool) -> int:
        """Of a chain that is yet to be drawn: from the fate of earlier ones alone.

        Not from its own tokens: one that is dropped after it was drawn, for looking unlikely,
        leaves a sample that is no longer q's, and the rules are exact for q only.
        """
        if limit < 1:
            return 0
        tokens = np.cumsum(self._mode_statistics.chain.means[0] ** np.arange(limit + 1))
        seconds = self._cost.table(self._num_seqs + limit)[self._num_seqs - 1 :]
        tokens = tokens[: len(seconds)]
        if uses_draft:
            seconds = seconds + self._level_seconds * np.arange(len(seconds))
        values = tokens - self._choice.rate * seconds
        # A step that was to use the draft tells nothing of it without a token.
        minimum = 1 if uses_draft else 0
        return minimum + int(values[minimum:].argmax())

    def _note_levels(self, tree: DraftTree, gains: NDArray[np.float64]) -> None:
        """What each of the model's levels gained (tokens, less what its rows cost)."""
        depths = np.array(tree.depths)
        is_drafted = np.array([DRAFT_SOURCE in sources for sources in tree.sources])
        deepest = int(depths[is_drafted].max(initial=0))
        draft = np.bincount(depths, weights=np.exp(tree.path_log_probs)).astype(np.float64)
        gained = np.bincount(depths, weights=gains).astype(np.float64)
        note_levels(self._mode_statistics.levels, draft[1:deepest], gained[2 : deepest + 1])
