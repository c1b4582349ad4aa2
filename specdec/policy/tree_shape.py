"""The shape of one tree: how far to grow it, and which part of it to verify.

With λ tokens per second a node is worth its probability P of being accepted, and costs λ times the
seconds that it adds. Everything here follows from that difference.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from specdec.config import SpecConfig
from specdec.drafters.base import TreeLimits
from specdec.policy.lessons import Experience, Lessons
from specdec.verification.tree import DRAFT_SOURCE, ROOT, DraftTree

_OPTIMISM = 0.15
"""How much faster than estimated a size of pass may be that was never tried: so it is, once."""
_TRIAL_NODES = 16
"""Enough to see whether a draft is useful."""


class TreeShape:
    """Shapes trees from what is known of costs and of acceptance.

    Args:
        config: what the user fixed.
        experience: how long passes and drafting take.
        lessons: how often such drafts are accepted.
        has_model: whether one of the drafters is a model, whose runs take time.
    """

    def __init__(
        self, config: SpecConfig, experience: Experience, lessons: Lessons, has_model: bool
    ) -> None:
        self._config = config
        self._experience = experience
        self._lessons = lessons
        self._has_model = has_model

    def limits(self, most: int, depth: int, uses_draft: bool) -> TreeLimits:
        """Of a proposal that may have at most so many nodes and levels."""
        config = self._config
        if uses_draft and self._lessons.choice.is_on_trial:
            most = min(most, _TRIAL_NODES)
            depth = depth if config.draft_depth is not None else min(depth, self._trial_depth())
        if config.acceptance != "match":
            return TreeLimits(self._chain_length(min(most, depth), uses_draft), depth, config.width)
        if uses_draft:
            most = self._lessons.n_candidates(most)
        return TreeLimits(most, depth, config.width, self._min_level_probability(uses_draft))

    def chain_tokens(self, length: int) -> float:
        """Expected tokens of a round with a drawn chain of so many tokens."""
        return 1.0 + float(self._lessons.chain.probabilities()[:length].sum())

    def best_part(self, tree: DraftTree, uses_draft: bool) -> tuple[DraftTree, float]:
        """The part of a proposal that is worth verifying, and the tokens expected of it."""
        probs = self._lessons.calibration.path_probabilities(tree)
        order = np.argsort(-probs[1:], kind="stable") + 1  # parents stay before their children
        tokens = 1.0 + np.concatenate(([0.0], np.cumsum(probs[order])))
        costs = self._lessons.choice.rate * self.pass_seconds(len(tree))
        is_trial = uses_draft and self._lessons.choice.is_on_trial
        n_most = self._trial_nodes(tree) if is_trial else tree.n_drafted
        n_kept = int((tokens - costs)[: 1 + n_most].argmax())
        if self._lessons.should_vary_size():
            n_kept //= 2
        if uses_draft and tree.n_drafted:
            self._lessons.note_kept(n_kept)
            # A node that is kept takes the place of the best one that is not.
            price = probs[order[n_kept]] if n_kept < tree.n_drafted else costs[-1] - costs[-2]
            self._note_levels(tree, np.maximum(probs - price, 0.0))
        expected = float(tokens[n_kept])
        if n_kept == tree.n_drafted:
            return tree, expected
        return tree.subset([ROOT, *sorted(order[:n_kept].tolist())]), expected

    def pass_seconds(self, max_rows: int) -> NDArray[np.float64]:
        """Of 1 to max_rows rows. Sizes that were hardly tried get the benefit of the doubt."""
        passes = self._experience.passes
        doubt = _OPTIMISM * np.exp2(-passes.evidence()[:max_rows])
        return passes.seconds()[:max_rows] * (1.0 - doubt)

    def least_draft_seconds(self) -> float:
        """What a round with one level and one node takes beyond one without the draft."""
        one_more = float(self._experience.passes.beyond_one()[:2][-1])
        return self._experience.drafts.seconds(1, 1) + one_more

    def _trial_depth(self) -> int:
        """Levels, each with a row of its own, that the stake pays for; at least one."""
        level = max(self.least_draft_seconds(), 1e-9)
        return max(1, int(self._lessons.choice.stake_seconds / level))

    def _trial_nodes(self, tree: DraftTree) -> int:
        """Nodes of this tree whose rows what is left of the stake pays for; at least one."""
        drafted = self._experience.drafts.seconds(tree.n_runs, tree.n_run_nodes)
        left = self._lessons.choice.stake_seconds - drafted
        beyond = self._experience.passes.beyond_one()[: len(tree)]
        return max(1, int(np.count_nonzero(beyond <= left)) - 1)

    def _min_level_probability(self, uses_draft: bool) -> float:
        """Draft probability of a level from which on one more run of the draft is worth its time.

        In terms of the uncalibrated probabilities that the drafter knows while it grows the tree.
        The first run of a round that uses the draft is never refused. The runs that this is about
        are those before the pass, which nothing hides: what was drafted ahead is not run again.
        """
        if not self._has_model:
            return 0.0
        if not uses_draft:
            return math.inf  # not even the root's level, whose probability is 1
        if self._config.draft_depth is not None:
            return 0.0
        worth = self._lessons.choice.rate * self._experience.drafts.run_seconds
        return self._lessons.levels.draft_probability(worth)

    def _chain_length(self, most: int, uses_draft: bool) -> int:
        """Of a chain that is yet to be drawn: from the fate of earlier ones alone.

        Not from its own tokens: one that is dropped after it was drawn, for looking unlikely,
        leaves a sample that is no longer q's, and the rules are exact for q only.
        """
        if most < 1:
            return 0
        lengths = np.arange(most + 1)
        survival = self._lessons.chain.probabilities()[:most]
        tokens = np.concatenate(([1.0], 1.0 + np.cumsum(survival)))
        seconds = self.pass_seconds(most + 1)
        if uses_draft:
            seconds = seconds + self._experience.drafts.run_seconds * lengths
        values = tokens - self._lessons.choice.rate * seconds
        # A round that was to use the draft tells nothing of it without a token.
        least = 1 if uses_draft else 0
        return least + int(values[least:].argmax())

    def _note_levels(self, tree: DraftTree, gains: NDArray[np.float64]) -> None:
        """What each of the model's levels gained (tokens, less what its rows cost)."""
        depths = np.array(tree.depths)
        is_drafted = np.array([DRAFT_SOURCE in sources for sources in tree.sources])
        deepest = int(depths[is_drafted].max(initial=0))
        draft = np.bincount(depths, weights=np.exp(tree.path_log_probs)).astype(np.float64)
        gained = np.bincount(depths, weights=gains).astype(np.float64)
        self._lessons.levels.observe(draft[1:deepest], gained[2 : deepest + 1])
