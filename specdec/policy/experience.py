"""What a loaded pair of models has shown so far; it survives generations.

How long passes and drafts take holds for every text. How often the draft is right is learnt apart
for each way of choosing tokens: a greedy target takes its likeliest token, a sampled one does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specdec.policy.calibration import Calibration, chain_survival, level_yield
from specdec.policy.cost_model import CostModel, level_seconds
from specdec.policy.fading import LASTING, MOST_KEPT, RECENT, FadingMean, kept_numbers
from specdec.policy.modes import DraftChoice

_VERSION = 4
"""Of what is kept: another one's is not used."""
_BROKEN = (KeyError, TypeError, ValueError, OverflowError)
"""What reading a file raises that somebody else wrote."""
_FIRST_NODES, _GROWTH = 16, 2
"""Slow start: the plan's curve and the draft's word are guesses, so that no tree is much larger
than those that were worth verifying lately. Nodes of the first tree, and how many times theirs
(bench/worlds: 0.99 of the speed with 32 nodes, 0.997 with 8; without any bound: docs/policy.md)."""


class Lessons:
    """What was learnt of the draft where tokens are chosen in one way.

    make: the choice that the plan's word makes for so many texts in one pass.
    """

    def __init__(self, make: Callable[[int], DraftChoice]) -> None:
        self._make = make
        self._choices: dict[int, DraftChoice] = {}
        self.calibration = Calibration()
        self.chain, self.levels = chain_survival(), level_yield()
        self._most_kept = _FIRST_NODES / _GROWTH

    def choice(self, n_texts: int = 1) -> DraftChoice:
        """With the draft or without it, where so many texts share a pass; about as many count as
        equal: passes of twice as many texts bring another number of tokens per second."""
        size = n_texts.bit_length()
        if size not in self._choices:
            self._choices[size] = self._make(n_texts)
        return self._choices[size]

    @property
    def n_candidates(self) -> int:
        """Nodes to ask drafters for: somewhat more than recent trees had use for."""
        return max(_FIRST_NODES // _GROWTH, int(_GROWTH * self._most_kept))

    def note_kept(self, n_nodes: int) -> None:
        """A tree of so many nodes was worth verifying."""
        self._most_kept = max(float(n_nodes), RECENT * self._most_kept)

    def kept(self) -> dict[str, Any]:
        return {
            "choices": {str(size): choice.kept() for size, choice in self._choices.items()},
            "calibration": self.calibration.kept(),
            "chain": self.chain.kept(),
            "levels": self.levels.kept(),
            "most_kept": self._most_kept,
        }

    def restore(self, kept: Any) -> None:
        """Raises ValueError, TypeError, KeyError."""
        for name, choice in dict(kept["choices"]).items():
            size = int(name)
            if not 1 <= size <= MOST_KEPT:
                raise ValueError("no number of texts")
            self.choice(2 ** (size - 1)).restore(choice)
        self.calibration.restore(kept["calibration"])
        self.chain.restore(kept["chain"])
        if not 0.0 < self.chain.means[0] <= 1.0:
            raise ValueError("no share of a chain's tokens")
        self.levels.restore(kept["levels"])
        self._most_kept = float(kept_numbers(kept["most_kept"], ()))


class Experience:
    """Costs, and lessons for each way of choosing tokens: at first what the plan expects.

    Args:
        cost: a pass of the target as planned; the object itself is left as it is.
        draft_cost: a run of one level of a tree through the draft model, if there is one.
        n_nodes: most draft tokens of a tree.

    Attributes:
        cost: a pass of the target, as planned and measured.
    """

    def __init__(self, cost: CostModel, draft_cost: CostModel | None, n_nodes: int) -> None:
        run_seconds = 0.0 if draft_cost is None else level_seconds(draft_cost, n_nodes)
        self.cost, self.draft_cost, self.n_nodes = replace(cost), draft_cost, n_nodes
        self._drafts = FadingMean(LASTING, (run_seconds,))
        self._lessons: dict[tuple[object, ...], Lessons] = {}
        self._kept: dict[str, Any] = {}  # of other processes: lessons that nobody asked for yet

    @property
    def run_seconds(self) -> float:
        """Of one run of the draft model, whose levels of all texts are one."""
        return self._drafts.means[0]

    def note_drafting(self, n_runs: int, seconds: float) -> None:
        if n_runs:
            self._drafts.add(seconds / n_runs, n=n_runs)

    def lessons(self, key: tuple[object, ...], make: Callable[[int], DraftChoice]) -> Lessons:
        """Those of one way of choosing tokens; new ones begin with `make`'s choices."""
        if key not in self._lessons:
            self._lessons[key] = Lessons(make)
            if (kept := self._kept.pop(str(key), None)) is not None:
                try:
                    self._lessons[key].restore(kept)
                except _BROKEN:
                    self._lessons[key] = Lessons(make)
        return self._lessons[key]

    def kept(self) -> dict[str, Any]:
        """All of it as JSON can hold it, for `experience_of` in another process."""
        lessons = {str(key): lessons.kept() for key, lessons in self._lessons.items()}
        return {
            "version": _VERSION,
            "passes": self.cost.kept().tolist(),
            "drafts": self._drafts.kept(),
            "lessons": dict([*lessons.items(), *self._kept.items()][:MOST_KEPT]),
        }


def experience_of(
    cost: CostModel, draft_cost: CostModel | None, n_nodes: int, kept: Any = None
) -> Experience:
    """One that begins with what another process has `kept`, as far as that can be made sense of."""
    experience = Experience(cost, draft_cost, n_nodes)
    try:
        if kept["version"] == _VERSION:
            experience.cost.restore(kept["passes"])
            experience._drafts.restore(kept["drafts"])
            if experience.run_seconds < 0.0:
                raise ValueError("no run of a draft")
            lessons = list(dict(kept["lessons"]).items())
            experience._kept = dict(lessons[:MOST_KEPT])
    except _BROKEN:
        return Experience(cost, draft_cost, n_nodes)
    return experience
