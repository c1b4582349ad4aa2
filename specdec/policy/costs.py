"""Seconds of target passes and of drafting: as planned, and as measured while they run.

Planning knows them from the storage's bandwidth and a few timed products or layers. What a pass
really takes also has long contexts and other programs in it, and it changes when the storage is
shared. So the plan's curve gives the shape between measured sizes, and recent rounds
give its height.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.drafters.model import level_width

_RESIDENT_SLACK = 1.5
"""How much longer than one row's a pass may take where no reads hide the arithmetic."""
_ROUNDING = 1e-6  # of a row: where exactly so many are free, they are
_KNOTS = np.log2(np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024]))
_PER_KNOT = 12  # latest passes kept of each size
_HALF_LIFE = 64.0  # passes of any size after which one counts half
_CLOSENESS = 0.25  # octaves of rows at which another size's evidence counts half
_N_DRAFTS = 24
_N_FITS = 10
_CLOSE_FIT = 0.02  # of a typical draft's seconds: nearer is not told apart
_PULL = 0.01  # drafts that the prior counts as


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
        return max(1, int((allowed - self.row_free_seconds) / self.seconds_per_row + _ROUNDING))


def level_seconds(draft_cost: PassCost, n_nodes: int) -> float:
    """What one level of a tree of that size costs the draft model, at most."""
    return draft_cost.seconds(min(n_nodes, level_width(n_nodes)))


class PassTimes:
    """Seconds of a pass of n rows: the plan's curve times a factor that recent passes fix.

    The factor at n is a weighted median of (measured / planned) over the latest passes of every
    size. Weights fall with age and, steeply, with the distance in log2(rows): a pass of another
    size counts only where this one was not seen for long. A median, because single passes stumble
    over other programs.

    Args:
        prior: the plan's seconds for a number of rows.
        max_rows: most rows that a pass can have.
    """

    def __init__(self, prior: Callable[[int], float], max_rows: int) -> None:
        self._rows = np.arange(1, max_rows + 1)
        self._prior = np.array([prior(n) for n in range(1, max_rows + 1)])
        shape = (len(_KNOTS), _PER_KNOT)
        self._ratios = np.zeros(shape)  # log(measured / planned)
        self._log_rows = np.zeros(shape)
        self._births = np.full(shape, -np.inf)  # -inf: empty
        self._next = [0] * len(_KNOTS)
        self._n_passes = 0
        self.most_rows = 0
        """Of the largest pass that was measured."""
        self._seconds = self._prior
        self._evidence = np.zeros(max_rows)

    def observe(self, n_rows: int, seconds: float) -> None:
        n_rows = min(n_rows, len(self._prior))
        if seconds <= 0.0:
            return
        self._n_passes += 1
        self.most_rows = max(self.most_rows, n_rows)
        knot = int(np.abs(_KNOTS - np.log2(n_rows)).argmin())
        slot = self._next[knot] % _PER_KNOT
        self._next[knot] += 1
        self._ratios[knot, slot] = np.log(seconds / self._prior[n_rows - 1])
        self._log_rows[knot, slot] = np.log2(n_rows)
        self._births[knot, slot] = self._n_passes
        self._fit()

    def seconds(self) -> NDArray[np.float64]:
        """Of passes of 1, 2, ... max_rows rows, float64 [max_rows]."""
        return self._seconds

    def evidence(self) -> NDArray[np.float64]:
        """How many recent passes of about that size there were, float64 [max_rows]."""
        return self._evidence

    def of(self, n_rows: int) -> float:
        return float(self._seconds[min(n_rows, len(self._seconds)) - 1])

    def beyond_one(self) -> NDArray[np.float64]:
        """What 1, 2, ... max_rows rows take beyond one, float64 [max_rows], ascending.

        No more than a larger pass, if one was quicker: sizes that are seldom seen are known from
        few passes, and those may have been disturbed.
        """
        at_most = np.minimum.accumulate(self._seconds[::-1])[::-1]
        return at_most - at_most[0]

    def _fit(self) -> None:
        is_filled = np.isfinite(self._births)
        ratios = self._ratios[is_filled]
        order = np.argsort(ratios)
        ages = self._n_passes - self._births[is_filled][order]
        distances = np.abs(_KNOTS[:, None] - self._log_rows[is_filled][order])
        # [knot, pass], passes in the order of their ratios
        weights = np.exp2(-ages / _HALF_LIFE) / (1.0 + (distances / _CLOSENESS) ** 4)
        cumulative = np.cumsum(weights, axis=1)
        middle = (cumulative >= cumulative[:, -1:] / 2).argmax(axis=1)
        log_rows = np.log2(self._rows)
        factors = np.interp(log_rows, _KNOTS, ratios[order][middle])
        self._seconds = self._prior * np.exp(factors)
        self._evidence = np.interp(log_rows, _KNOTS, cumulative[:, -1])


class DraftTimes:
    """Seconds of drafting a tree: fixed + per run of the draft model + per node that it runs.

    Fitted to recent drafts by least absolute deviations (reweighted least squares), which single
    drafts that were disturbed hardly move; no part is below zero. A weak pull towards "all of it is
    per run" decides what drafts of one size do not tell apart.

    Args:
        prior_run_seconds: the plan's figure for one run.
    """

    def __init__(self, prior_run_seconds: float) -> None:
        self._drafts: deque[tuple[float, float, float, float]] = deque(maxlen=_N_DRAFTS)
        self._parts = np.array([0.0, prior_run_seconds, 0.0])  # fixed, per run, per node
        self._width = 1.0  # nodes of a run, lately
        self._is_fitted = True

    def observe(self, n_runs: int, n_nodes: int, seconds: float) -> None:
        """So many runs, of so many nodes in all."""
        if n_runs < 1 or seconds <= 0.0:
            return
        self._drafts.append((1.0, n_runs, n_nodes, seconds))
        self._is_fitted = False

    @property
    def run_seconds(self) -> float:
        """Of one more run, as wide as recent ones were."""
        self._fit()
        return float(self._parts[1] + self._width * self._parts[2])

    def seconds(self, n_runs: int, n_nodes: int) -> float:
        self._fit()
        return float(self._parts @ (1.0, n_runs, n_nodes)) if n_runs > 0 else 0.0

    def _fit(self) -> None:
        """Once somebody asks: nobody does where the user fixed the size of trees."""
        if self._is_fitted:
            return
        *sizes, times = (np.array(column) for column in zip(*self._drafts, strict=True))
        self._width = float(sizes[2].sum() / sizes[1].sum())
        scale = np.array([column.mean() for column in sizes])
        typical = float(np.median(times))
        prior = np.array([0.0, float(np.median(times / sizes[1])) * scale[1] / typical, 0.0])
        shares = _least_deviations(np.column_stack(sizes) / scale, times / typical, prior)
        self._parts = shares * typical / scale
        self._is_fitted = True


def _least_deviations(
    sizes: NDArray[np.float64], times: NDArray[np.float64], prior: NDArray[np.float64]
) -> NDArray[np.float64]:
    """x ≥ 0 with a small sum of |sizes @ x - times|, weakly pulled towards the prior."""
    weights = np.ones(len(times))
    found, pull = prior, _PULL * np.eye(len(prior))
    for _ in range(_N_FITS):
        weighted = (sizes * weights[:, None]).T
        found = _least_squares(weighted @ sizes + pull, weighted @ times + _PULL * prior)
        weights = 1.0 / np.maximum(np.abs(sizes @ found - times), _CLOSE_FIT)
        weights /= weights.max()
    return found


def _least_squares(gram: NDArray[np.float64], moments: NDArray[np.float64]) -> NDArray[np.float64]:
    """The x ≥ 0 of these normal equations; parts that come out negative are left out."""
    is_used = np.ones(len(moments), dtype=bool)
    while True:
        found = np.zeros(len(moments))
        found[is_used] = np.linalg.solve(gram[np.ix_(is_used, is_used)], moments[is_used])
        if (found >= 0.0).all():
            return found
        is_used &= found > 0.0
