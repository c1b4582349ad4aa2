"""Seconds of target passes: as planned, and as measured while they run.

Planning knows them from the storage's bandwidth and a few timed products or layers. What a pass
really takes also has long contexts and other programs in it, and it changes when the storage is
shared. So the plan's curve gives the shape between measured sizes, and recent rounds
give its height.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.drafters.model import level_width
from specdec.policy.fading import LASTING, RECENT, kept_numbers

_RESIDENT_SLACK = 1.5
"""Times as long as with one row, that a pass may take where no reads hide the arithmetic: a guess
of the plan, until passes are measured."""
_KNOTS = np.log2(np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024]))
"""log2 of the rows at which a pass's time is learnt."""
MOST_TIMED_ROWS = 1024
"""Of a pass; prompts may enter beside several texts."""
_CLOSENESS = 0.25
"""Octaves of rows at which a pass of another size counts half: kernels have steps (bench/worlds:
with one factor for all sizes 0.95 of the speed on average, 0.80 in the worst world)."""
_LARGEST_LOG = 20.0
"""Of the seconds of a pass in a file: none takes fifteen years."""


@dataclass(frozen=True)
class PassCost:
    """Seconds of one target pass as a function of its rows."""

    read_seconds: float
    row_free_seconds: float
    """Arithmetic of a pass that does not depend on the number of rows; below zero where only
    passes of many rows are held up by them."""
    seconds_per_row: float

    def seconds(self, n_rows: int) -> float:
        return max(self.read_seconds, self.row_free_seconds + self.seconds_per_row * n_rows)

    def free_rows(self) -> int:
        """Most rows whose arithmetic hides behind the reads (or within the slack)."""
        one_row = self.row_free_seconds + self.seconds_per_row
        allowed = max(self.read_seconds, _RESIDENT_SLACK * one_row)
        n_rows = (allowed - self.row_free_seconds) / self.seconds_per_row
        return max(1, int(n_rows + 1e-6))  # where exactly so many are free, they are


def level_seconds(draft_cost: PassCost, n_nodes: int) -> float:
    """What one level of a tree of that size costs the draft model, at most."""
    return draft_cost.seconds(min(n_nodes, level_width(n_nodes)))


class PassTimes:
    """Seconds of a pass of n rows: the plan's curve times a factor that recent passes fix.

    The factor at n is a weighted mean of log(measured / planned) over passes of every size. Weights
    fall with age and, steeply, with the distance in log2(rows): a pass of another size counts only
    where this one was not seen for long.

    Args:
        prior: the plan's seconds for a number of rows.
        max_rows: most rows that a pass can have.
    """

    def __init__(self, prior: Callable[[int], float], max_rows: int) -> None:
        self._prior = np.array([prior(n) for n in range(1, max_rows + 1)])
        self._log_rows = np.log2(np.arange(1, max_rows + 1))
        # [knot, (weight, weighted sum of log(measured / planned))]
        self._sums = np.zeros((len(_KNOTS), 2))
        self._fit()

    def observe(self, n_rows: int, seconds: float) -> None:
        if seconds <= 0.0 or n_rows > len(self._prior):
            return
        knot = int(np.abs(_KNOTS - np.log2(n_rows)).argmin())
        self._sums *= LASTING
        self._sums[knot] *= RECENT
        self._sums[knot] += (1.0, math.log(seconds / self._prior[n_rows - 1]))
        self._fit()

    @property
    def max_rows(self) -> int:
        """Of a pass whose time is known."""
        return len(self._prior)

    def seconds(self, max_rows: int) -> NDArray[np.float64]:
        """Of passes of 1 to max_rows rows, float64 [max_rows]."""
        return self._seconds[:max_rows]

    def kept(self) -> NDArray[np.float64]:
        """[knot, (weight, weighted sum of log seconds)]: for `restore`, under another plan too."""
        return self._sums + np.outer(self._sums[:, 0], (0.0, 1.0)) * self._log_prior

    def restore(self, kept: object) -> None:
        """What another process measured counts as one pass of each size. Raises ValueError."""
        sums = kept_numbers(kept, self._sums.shape)
        if (sums[:, 0] < 0.0).any():
            raise ValueError("weights below zero")
        sums = sums / np.maximum(sums[:, :1], 1.0)
        if (np.abs(sums[:, 1]) > _LARGEST_LOG * sums[:, 0]).any():
            raise ValueError("no pass takes so long, or so short")
        self._sums = sums - np.outer(sums[:, 0], (0.0, 1.0)) * self._log_prior
        self._fit()

    @property
    def _log_prior(self) -> NDArray[np.float64]:
        """Of the plan's seconds at the knots, [knot, 1]."""
        rows = np.minimum(np.exp2(_KNOTS).round().astype(int), len(self._prior))
        return np.log(self._prior[rows - 1])[:, None]

    def of(self, n_rows: int) -> float:
        return float(self._seconds[min(n_rows, len(self._seconds)) - 1])

    def _fit(self) -> None:
        distances = np.abs(_KNOTS[:, None] - _KNOTS)
        closeness = 1.0 / (1.0 + (distances / _CLOSENESS) ** 4)
        weights, ratios = (closeness @ self._sums).T
        factors = ratios / np.maximum(weights, 1e-9)
        self._seconds = self._prior * np.exp(np.interp(self._log_rows, _KNOTS, factors))
