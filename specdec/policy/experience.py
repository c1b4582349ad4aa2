"""What a loaded pair of models has shown so far; it survives generations.

How long passes and drafts take holds for every text. How often the draft is right is learnt apart
for each way of choosing tokens: a greedy target takes its likeliest token, a sampled one does not.
"""

from __future__ import annotations

from collections.abc import Callable

from specdec.policy.assumptions import ASSUMED_LEVEL_ACCEPTANCE
from specdec.policy.calibration import Calibration, ChainSurvival, LevelYield
from specdec.policy.costs import RECENT, DraftTimes, PassCost, PassTimes, level_seconds
from specdec.policy.modes import AheadChoice, DraftChoice

_FIRST_NODES, _GROWTH = 16, 2
"""Slow start: the plan's curve and the draft's word are guesses, so that no tree is much larger
than those that were worth verifying lately. Nodes of the first tree, and how many times theirs."""


class Lessons:
    """What was learnt of the draft where tokens are chosen in one way."""

    def __init__(self, choice: DraftChoice) -> None:
        self.choice = choice
        self.calibration = Calibration()
        self.chain = ChainSurvival(ASSUMED_LEVEL_ACCEPTANCE)
        self.levels = LevelYield()
        self._most_kept = _FIRST_NODES / _GROWTH

    @property
    def n_candidates(self) -> int:
        """Nodes to ask drafters for: somewhat more than recent trees had use for."""
        return max(_FIRST_NODES // _GROWTH, int(_GROWTH * self._most_kept))

    def note_kept(self, n_nodes: int) -> None:
        """A tree of so many nodes was worth verifying."""
        self._most_kept = max(float(n_nodes), RECENT * self._most_kept)


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
