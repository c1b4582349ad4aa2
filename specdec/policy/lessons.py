"""What a loaded pair of models has shown so far; it survives generations.

How long passes and drafts take holds for every text. How often the draft is right is learnt apart
for each way of choosing tokens: a greedy target takes its likeliest token, a sampled one does not.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from specdec.policy.ahead_choice import AheadChoice
from specdec.policy.assumptions import ASSUMED_LEVEL_ACCEPTANCE
from specdec.policy.calibration import Calibration, ChainSurvival
from specdec.policy.costs import DraftTimes, PassCost, PassTimes, level_seconds
from specdec.policy.draft_choice import DraftChoice

MAX_CHAIN = 128  # tokens of a sampled chain about which anything is learnt
_N_KEPT = 8
_VARIED = 16  # trees of which one is cut in half
_LEVEL_FADE = 0.9  # weight of a tree's levels after the next tree
_SLOPES = (0.5, 8.0)
_LEAST_GAIN = 0.01
_PSEUDO_OBSERVATIONS = np.array([2.0, -2.0, -2.0, 4.0, 4.0])
"""Sums of 1, x, y, x*x, x*y over two pseudo-observations on y = x: (0, 0) and (-2, -2)."""
_TRUST = 0.1
"""Times those two count always: where trees of two levels give points in one place only, their
scatter alone would decide the slope, and could keep trees that small."""


class LevelYield:
    """What one more level of the draft's brings, by the draft probability of the level above it.

    The drafter must decide while it knows nothing but its own probabilities. An overconfident one
    is the more wrong the deeper it goes, so the relation is a power: a line through
    (log draft probability of a level, log of the tokens that the next one gained), fitted to
    recent trees, with a lasting pull towards "as the draft says".
    """

    def __init__(self) -> None:
        self._sums = np.zeros_like(_PSEUDO_OBSERVATIONS)

    def observe(self, draft: NDArray[np.float64], gains: NDArray[np.float64]) -> None:
        """Total draft probability of levels, and tokens gained by the level below each."""
        x, y = (np.log(np.maximum(values, _LEAST_GAIN)) for values in (draft, gains))
        # Trees of one level teach nothing, and what made them so fades.
        new = np.array([len(x), x.sum(), y.sum(), (x * x).sum(), (x * y).sum()])
        self._sums = _LEVEL_FADE * self._sums + new

    def draft_probability(self, gain: float) -> float:
        """Of the level below which the next one gains so many tokens."""
        sums = self._sums + _TRUST * _PSEUDO_OBSERVATIONS
        _, x, y, xx, xy = sums / sums[0]
        slope = (xy - x * y) / (xx - x * x)
        slope = min(max(slope, _SLOPES[0]), _SLOPES[1])
        log_probability = x + (math.log(max(gain, _LEAST_GAIN)) - y) / slope
        return math.exp(min(log_probability, 0.0))


class Lessons:
    """What was learnt of the draft where tokens are chosen in one way."""

    def __init__(self, choice: DraftChoice) -> None:
        self.choice = choice
        self.calibration = Calibration()
        self.chain = ChainSurvival(ASSUMED_LEVEL_ACCEPTANCE, MAX_CHAIN)
        self.levels = LevelYield()
        self._kept: deque[int] = deque(maxlen=_N_KEPT)
        self._n_trees = 0

    def should_vary_size(self) -> bool:
        """Whether to verify a smaller tree than the best one, once in a while.

        How long passes of other sizes take by now shows only by running them.
        """
        self._n_trees += 1
        return self._n_trees % _VARIED == 0

    def note_kept(self, n_nodes: int) -> None:
        """A tree of so many nodes was worth verifying."""
        self._kept.append(n_nodes)

    def n_candidates(self, most: int) -> int:
        """Nodes to ask a draft model for: somewhat more than recent trees had use for."""
        return min(most, 4 + 3 * max(self._kept) // 2) if self._kept else most


class Experience:
    """Costs, and lessons for each way of choosing tokens: at first what the plan expects.

    Args:
        cost: of a pass of the target, as planned.
        draft_cost: of running one level of a tree through the draft model, if there is one.
        n_nodes: most draft tokens of a tree.
    """

    def __init__(self, cost: PassCost, draft_cost: PassCost | None, n_nodes: int) -> None:
        run_seconds = 0.0 if draft_cost is None else level_seconds(draft_cost, n_nodes)
        self.passes = PassTimes(cost.seconds, 1 + n_nodes)
        self.drafts = DraftTimes(run_seconds)
        self.ahead = AheadChoice()
        self._lessons: dict[tuple[object, ...], Lessons] = {}

    def lessons(self, key: tuple[object, ...], make: Callable[[], DraftChoice]) -> Lessons:
        """Those of one way of choosing tokens; new ones begin with `make`'s choice."""
        if key not in self._lessons:
            self._lessons[key] = Lessons(make())
        return self._lessons[key]
