"""Acceptance statistics and costs of a loaded pair of models, kept across generations.

Times of passes and drafts hold for every sequence. Acceptance is learnt apart for each mode of
choosing tokens: a greedy target takes its likeliest token, a sampled one does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specdec.policy.calibration import Calibration, chain_survival, level_yield
from specdec.policy.cost_model import CostModel, level_seconds
from specdec.policy.fading import LASTING, MAX_RETAINED, RECENT, FadingMean, saved_numbers
from specdec.policy.modes import DraftChoice

_VERSION = 5
"""Version of the saved statistics; files of other versions are ignored."""
_BROKEN = (KeyError, TypeError, ValueError, OverflowError)
"""Errors of reading a file with foreign content."""
_FIRST_NODES, _GROWTH = 16, 2
"""Slow start, because planned costs and draft probabilities are guesses: nodes of the first tree,
and maximum growth over trees that were worth verifying lately (bench/scenarios: 0.99 of the speed
with 32 nodes, 0.997 with 8; without any bound: docs/policy.md)."""


class ModeStatistics:
    """Acceptance statistics of one mode of choosing tokens.

    make: returns the planned choice for a number of sequences in one pass.
    """

    def __init__(self, make: Callable[[int], DraftChoice]) -> None:
        self._make = make
        self._choices: dict[int, DraftChoice] = {}
        self.calibration = Calibration()
        self.chain, self.levels = chain_survival(), level_yield()
        self._max_retained = _FIRST_NODES / _GROWTH

    def choice(self, num_seqs: int = 1) -> DraftChoice:
        """Return the choice between drafting and plain decoding for `num_seqs` sequences per pass.

        There is one for each doubling of the number of sequences, whose speed differs.
        """
        size = num_seqs.bit_length()
        if size not in self._choices:
            self._choices[size] = self._make(num_seqs)
        return self._choices[size]

    @property
    def n_candidates(self) -> int:
        """Nodes to request from drafters: somewhat more than recent trees retained."""
        return max(_FIRST_NODES // _GROWTH, int(_GROWTH * self._max_retained))

    def note_retained(self, n_nodes: int) -> None:
        """Record that a tree of `n_nodes` nodes was worth verifying."""
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
        """Restore the output of `cached`. Raises ValueError, TypeError, KeyError."""
        for name, choice in dict(cached["choices"]).items():
            size = int(name)
            if not 1 <= size <= MAX_RETAINED:
                raise ValueError("no number of sequences")
            self.choice(2 ** (size - 1)).restore(choice)
        self.calibration.restore(cached["calibration"])
        self.chain.restore(cached["chain"])
        if not 0.0 < self.chain.means[0] <= 1.0:
            raise ValueError("no acceptance rate of chains")
        self.levels.restore(cached["levels"])
        self._max_retained = float(saved_numbers(cached["max_retained"], ()))


class AcceptanceStatistics:
    """Costs, and statistics for each mode of choosing tokens; the plan's values at first.

    Args:
        cost: planned seconds of a target pass; copied, not changed.
        draft_cost: planned seconds of a draft pass, which runs one level; None without a draft.
        n_nodes: maximum draft tokens of a tree.

    Attributes:
        cost: seconds of a target pass, as planned and measured.
    """

    def __init__(self, cost: CostModel, draft_cost: CostModel | None, n_nodes: int) -> None:
        run_seconds = 0.0 if draft_cost is None else level_seconds(draft_cost, n_nodes)
        self.cost, self.draft_cost, self.n_nodes = replace(cost), draft_cost, n_nodes
        self._drafts = FadingMean(LASTING, (run_seconds,))
        self._mode_statistics: dict[tuple[object, ...], ModeStatistics] = {}
        self._saved: dict[str, Any] = {}  # statistics of other processes, not restored yet

    @property
    def run_seconds(self) -> float:
        """Seconds of one run of the draft model, which computes a level of all sequences."""
        return self._drafts.means[0]

    def note_drafting(self, n_runs: int, seconds: float) -> None:
        if n_runs:
            self._drafts.add(seconds / n_runs, n=n_runs)

    def mode_statistics(
        self, key: tuple[object, ...], make: Callable[[int], DraftChoice]
    ) -> ModeStatistics:
        """Return the statistics of one mode of choosing tokens; new ones begin with `make`."""
        if key not in self._mode_statistics:
            self._mode_statistics[key] = ModeStatistics(make)
            if (cached := self._saved.pop(str(key), None)) is not None:
                try:
                    self._mode_statistics[key].restore(cached)
                except _BROKEN:
                    self._mode_statistics[key] = ModeStatistics(make)
        return self._mode_statistics[key]

    def cached(self) -> dict[str, Any]:
        """Return JSON-serialisable state, for `acceptance_statistics_of` in another process."""
        mode_statistics = {
            str(key): mode_statistics.cached()
            for key, mode_statistics in self._mode_statistics.items()
        }
        return {
            "version": _VERSION,
            "passes": self.cost.cached().tolist(),
            "drafts": self._drafts.cached(),
            "mode_statistics": dict(
                [*mode_statistics.items(), *self._saved.items()][:MAX_RETAINED]
            ),
        }


def acceptance_statistics_of(
    cost: CostModel, draft_cost: CostModel | None, n_nodes: int, cached: Any = None
) -> AcceptanceStatistics:
    """Return statistics that begin with another process's `cached` ones, where these are valid."""
    loaded = AcceptanceStatistics(cost, draft_cost, n_nodes)
    try:
        if cached["version"] == _VERSION:
            loaded.cost.restore(cached["passes"])
            loaded._drafts.restore(cached["drafts"])
            if loaded.run_seconds < 0.0:
                raise ValueError("no duration of a draft run")
            mode_statistics = list(dict(cached["mode_statistics"]).items())
            loaded._saved = dict(mode_statistics[:MAX_RETAINED])
    except _BROKEN:
        return AcceptanceStatistics(cost, draft_cost, n_nodes)
    return loaded
