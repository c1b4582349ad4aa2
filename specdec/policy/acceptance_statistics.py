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
from specdec.policy.fading import LASTING, MAX_RETAINED, RECENT, FadingMean, saved_numbers
from specdec.policy.modes import DraftChoice

_VERSION = 4
"""Of what is kept: another one's is not used."""
_BROKEN = (KeyError, TypeError, ValueError, OverflowError)
"""What reading a file raises that somebody else wrote."""
_FIRST_NODES, _GROWTH = 16, 2
"""Slow start: the plan's curve and the draft's word are guesses, so that no tree is much larger
than those that were worth verifying lately. Nodes of the first tree, and how many times theirs
(bench/worlds: 0.99 of the speed with 32 nodes, 0.997 with 8; without any bound: docs/policy.md)."""


class ModeStatistics:
    """What was learnt of the draft where tokens are chosen in one way.

    make: the choice that the plan's word makes for so many sequences in one pass.
    """

    def __init__(self, make: Callable[[int], DraftChoice]) -> None:
        self._make = make
        self._choices: dict[int, DraftChoice] = {}
        self.calibration = Calibration()
        self.chain, self.levels = chain_survival(), level_yield()
        self._max_retained = _FIRST_NODES / _GROWTH

    def choice(self, num_seqs: int = 1) -> DraftChoice:
        """With the draft or without it, where so many sequences share a pass; about as many count as
        equal: passes of twice as many sequences bring another number of tokens per second."""
        size = num_seqs.bit_length()
        if size not in self._choices:
            self._choices[size] = self._make(num_seqs)
        return self._choices[size]

    @property
    def n_candidates(self) -> int:
        """Nodes to ask drafters for: somewhat more than recent trees had use for."""
        return max(_FIRST_NODES // _GROWTH, int(_GROWTH * self._max_retained))

    def note_retained(self, n_nodes: int) -> None:
        """A tree of so many nodes was worth verifying."""
        self._max_retained = max(float(n_nodes), RECENT * self._max_retained)

    def cached(self) -> dict[str, Any]:
        return {
            "choices": {str(size): choice.cached() for size, choice in self._choices.items()},
            "calibration": self.calibration.cached(),
            "chain": self.chain.cached(),
            "levels": self.levels.cached(),
            "max_retained": self._max_retained,
        }

    def restore(self, cached: Any) -> None:
        """Raises ValueError, TypeError, KeyError."""
        for name, choice in dict(cached["choices"]).items():
            size = int(name)
            if not 1 <= size <= MAX_RETAINED:
                raise ValueError("no number of texts")
            self.choice(2 ** (size - 1)).restore(choice)
        self.calibration.restore(cached["calibration"])
        self.chain.restore(cached["chain"])
        if not 0.0 < self.chain.means[0] <= 1.0:
            raise ValueError("no share of a chain's tokens")
        self.levels.restore(cached["levels"])
        self._max_retained = float(saved_numbers(cached["max_retained"], ()))


class AcceptanceStatistics:
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
        self._mode_statistics: dict[tuple[object, ...], ModeStatistics] = {}
        self._retained: dict[str, Any] = {}  # of other processes: lessons that nobody asked for yet

    @property
    def run_seconds(self) -> float:
        """Of one run of the draft model, whose levels of all sequences are one."""
        return self._drafts.means[0]

    def note_drafting(self, n_runs: int, seconds: float) -> None:
        if n_runs:
            self._drafts.add(seconds / n_runs, n=n_runs)

    def mode_statistics(
        self, key: tuple[object, ...], make: Callable[[int], DraftChoice]
    ) -> ModeStatistics:
        """Those of one way of choosing tokens; new ones begin with `make`'s choices."""
        if key not in self._mode_statistics:
            self._mode_statistics[key] = ModeStatistics(make)
            if (cached := self._retained.pop(str(key), None)) is not None:
                try:
                    self._mode_statistics[key].restore(cached)
                except _BROKEN:
                    self._mode_statistics[key] = ModeStatistics(make)
        return self._mode_statistics[key]

    def cached(self) -> dict[str, Any]:
        """All of it as JSON can hold it, for `experience_of` in another process."""
        mode_statistics = {
            str(key): mode_statistics.cached()
            for key, mode_statistics in self._mode_statistics.items()
        }
        return {
            "version": _VERSION,
            "passes": self.cost.cached().tolist(),
            "drafts": self._drafts.cached(),
            "mode_statistics": dict(
                [*mode_statistics.items(), *self._retained.items()][:MAX_RETAINED]
            ),
        }


def acceptance_statistics_of(
    cost: CostModel, draft_cost: CostModel | None, n_nodes: int, cached: Any = None
) -> AcceptanceStatistics:
    """One that begins with what another process has `kept`, as far as that can be made sense of."""
    acceptance_statistics = AcceptanceStatistics(cost, draft_cost, n_nodes)
    try:
        if cached["version"] == _VERSION:
            acceptance_statistics.cost.restore(cached["passes"])
            acceptance_statistics._drafts.restore(cached["drafts"])
            if acceptance_statistics.run_seconds < 0.0:
                raise ValueError("no run of a draft")
            mode_statistics = list(dict(cached["mode_statistics"]).items())
            acceptance_statistics._retained = dict(mode_statistics[:MAX_RETAINED])
    except _BROKEN:
        return AcceptanceStatistics(cost, draft_cost, n_nodes)
    return acceptance_statistics
