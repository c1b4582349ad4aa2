"""CostModel: how long a forward pass takes, as planned and as measured while passes run.

Planning knows it from the storage's bandwidth and a few timed products or layers. What a pass
really takes also has long contexts and other programs in it, and it changes when the storage is
shared. So the plan gives the shape between measured sizes, and recent passes give its height.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specdec.drafters.model import level_width
from specdec.policy.fading import LASTING, RECENT, saved_numbers

_RESIDENT_SLACK = 1.5
"""Times as long as with one token, that a pass may take where no reads hide the arithmetic: a guess
of the plan, until passes are measured."""
_KNOTS = np.log2(np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024]))
"""log2 of the numbers of tokens at which a pass's time is learnt."""
MAX_MEASURED_TOKENS = 1024
"""Tokens of the largest pass that is learnt from; prompts may enter beside several sequences."""
_SIZES = np.arange(1, MAX_MEASURED_TOKENS + 1)
_LOG_SIZES = np.log2(_SIZES)
_CLOSENESS = 0.25
"""Octaves of tokens at which a pass of another size counts half: kernels have steps (bench/worlds:
with one factor for all sizes 0.95 of the speed on average, 0.80 in the worst world)."""
_LARGEST_LOG = 20.0
"""Bound on log(seconds of a pass) in a file: none takes fifteen years."""
_ROUNDING = 1.0 + 1e-9


@dataclass(eq=False)
class CostModel:
    """Seconds of a forward pass by its number of tokens.

    The plan is a line of two pieces: max(read_seconds, fixed_seconds + seconds_per_token *
    num_tokens). Measured passes correct it by a factor for each size: a weighted mean of
    log(measured / planned) over passes of every size. Weights fall with age and, steeply, with the
    distance in log2(num_tokens): a pass of another size counts only where this one was not seen for
    long.

    Args:
        read_seconds: planned for a pass whose arithmetic hides behind its reads.
        fixed_seconds: arithmetic that does not depend on the number of tokens; below zero where
            only passes of many tokens are held up by them.
        seconds_per_token: arithmetic of each token.
    """

    read_seconds: float
    fixed_seconds: float
    seconds_per_token: float
    # [knot, (weight, weighted sum of log(measured / planned))]
    _sums: NDArray[np.float64] = field(init=False, repr=False)
    _factors: NDArray[np.float64] = field(init=False, repr=False)  # log of it, [knot]
    _table: NDArray[np.float64] | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        self._sums = np.zeros((len(_KNOTS), 2))
        self._factors = np.zeros(len(_KNOTS))

    def planned_seconds(self, num_tokens: int) -> float:
        """Return the plan's word, whatever was measured."""
        return max(self.read_seconds, self.fixed_seconds + self.seconds_per_token * num_tokens)

    def seconds(self, num_tokens: int) -> float:
        """Return how long a pass of so many tokens takes."""
        factor = np.exp(np.interp(math.log2(num_tokens), _KNOTS, self._factors))
        return self.planned_seconds(num_tokens) * float(factor)

    def table(self, max_num_tokens: int) -> NDArray[np.float64]:
        """Return the seconds of passes of 1, 2, ... tokens, float64 [n].

        n is max_num_tokens, or MAX_MEASURED_TOKENS if that is less.
        """
        if self._table is None:
            planned = np.maximum(
                self.read_seconds, self.fixed_seconds + self.seconds_per_token * _SIZES
            )
            self._table = planned * np.exp(np.interp(_LOG_SIZES, _KNOTS, self._factors))
        return self._table[:max_num_tokens]

    def max_num_tokens(self, seconds: float) -> int:
        """Return the tokens of the largest pass that takes at most so long; 0 if none does."""
        within = np.flatnonzero(self.table(MAX_MEASURED_TOKENS) <= seconds * _ROUNDING)
        if len(within) < 1 or within[-1] < MAX_MEASURED_TOKENS - 1:
            return int(within[-1]) + 1 if len(within) else 0
        # Larger passes are not measured: they take as much longer than planned as the largest one.
        planned = seconds * _ROUNDING / math.exp(self._factors[-1])
        num_tokens = int((planned - self.fixed_seconds) / self.seconds_per_token)
        return max(MAX_MEASURED_TOKENS, num_tokens)

    @property
    def streams(self) -> bool:
        """Whether reads of weights take part of every pass, so that processors wait."""
        return self.read_seconds > 0.0

    @property
    def num_free_tokens(self) -> int:
        """Most tokens whose arithmetic hides behind the planned reads, or within the slack."""
        one_token = self.fixed_seconds + self.seconds_per_token
        allowed = max(self.read_seconds, _RESIDENT_SLACK * one_token)
        num_tokens = (allowed - self.fixed_seconds) / self.seconds_per_token
        return max(1, int(num_tokens + 1e-6))  # where exactly so many are free, they are

    def to_dict(self) -> dict[str, float]:
        """Return the plan's part of it."""
        return {
            "read_seconds": self.read_seconds,
            "fixed_seconds": self.fixed_seconds,
            "seconds_per_token": self.seconds_per_token,
        }

    # --- measured ------------------------------------------------------------------------------

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Correct the plan by a pass that was measured."""
        if seconds <= 0.0 or num_tokens > MAX_MEASURED_TOKENS:
            return
        knot = int(np.abs(_KNOTS - np.log2(num_tokens)).argmin())
        self._sums *= LASTING
        self._sums[knot] *= RECENT
        self._sums[knot] += (1.0, math.log(seconds / self.planned_seconds(num_tokens)))
        self._fit()

    def cached(self) -> NDArray[np.float64]:
        """[knot, (weight, weighted sum of log seconds)]: for `restore`, under another plan too."""
        return self._sums + np.outer(self._sums[:, 0], (0.0, 1.0)) * _log_planned(self)

    def restore(self, cached: object) -> None:
        """Take up what another process measured as one pass of each size. Raises ValueError."""
        sums = saved_numbers(cached, self._sums.shape)
        if (sums[:, 0] < 0.0).any():
            raise ValueError("weights below zero")
        sums = sums / np.maximum(sums[:, :1], 1.0)
        if (np.abs(sums[:, 1]) > _LARGEST_LOG * sums[:, 0]).any():
            raise ValueError("no pass takes so long, or so short")
        self._sums = sums - np.outer(sums[:, 0], (0.0, 1.0)) * _log_planned(self)
        self._fit()

    def _fit(self) -> None:
        distances = np.abs(_KNOTS[:, None] - _KNOTS)
        closeness = 1.0 / (1.0 + (distances / _CLOSENESS) ** 4)
        weights, ratios = (closeness @ self._sums).T
        self._factors = ratios / np.maximum(weights, 1e-9)
        self._table = None


def _log_planned(cost: CostModel) -> NDArray[np.float64]:
    """Return the log of the planned seconds at the knots, [knot, 1]."""
    sizes = np.exp2(_KNOTS).round().astype(int).tolist()
    return np.log([cost.planned_seconds(size) for size in sizes])[:, None]


def level_seconds(draft_cost: CostModel, num_nodes: int) -> float:
    """Return what one level of a tree of that size costs the draft model, at most, as planned."""
    return draft_cost.planned_seconds(min(num_nodes, level_width(num_nodes)))
