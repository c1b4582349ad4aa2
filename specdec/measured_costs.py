"""Seconds of target passes and of drafting, as measured while they run.

Planning knows them from the storage's bandwidth and one timed matrix product. What a pass really
takes also has attention, a library's overheads and other programs in it, and it changes when the
storage is shared. So the plan's curve gives the shape between measured sizes, and recent rounds
give its height.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

_KNOTS = np.log2(np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024]))
_PER_KNOT = 12  # latest passes kept of each size
_HALF_LIFE = 64.0  # passes of any size after which one counts half
_CLOSENESS = 0.25  # octaves of rows at which another size's evidence counts half
_N_DRAFTS = 24


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
    """Seconds of drafting a tree: fixed + per_run * runs of the draft model.

    The slope is Theil and Sen's median over all pairs of recent drafts.

    Args:
        prior_run_seconds: the plan's figure for one run.
    """

    def __init__(self, prior_run_seconds: float) -> None:
        self._drafts: deque[tuple[int, float]] = deque(maxlen=_N_DRAFTS)
        self.run_seconds = prior_run_seconds
        self.fixed_seconds = 0.0

    @property
    def is_measured(self) -> bool:
        return bool(self._drafts)

    def observe(self, n_runs: int, seconds: float) -> None:
        if n_runs < 1 or seconds <= 0.0:
            return
        self._drafts.append((n_runs, seconds))
        runs, times = (np.array(column, dtype=float) for column in zip(*self._drafts, strict=True))
        mean_run = float(np.median(times / runs))
        apart = np.subtract.outer(runs, runs)
        is_pair = apart > 0
        if is_pair.sum() < _N_DRAFTS:  # too few sizes to tell what is fixed
            self.run_seconds, self.fixed_seconds = mean_run, 0.0
            return
        slope = float(np.median(np.subtract.outer(times, times)[is_pair] / apart[is_pair]))
        self.run_seconds = min(max(slope, 0.1 * mean_run), mean_run)
        self.fixed_seconds = max(0.0, float(np.median(times - self.run_seconds * runs)))

    def seconds(self, n_runs: float) -> float:
        return self.fixed_seconds + self.run_seconds * n_runs if n_runs > 0 else 0.0
