"""CostModel: seconds of a forward pass, as planned and as measured while passes run.

The plan is made from the storage's bandwidth and a few timed matrix products or layers. Real passes
also depend on long contexts, on other programs, and on the load of the storage. So the plan gives
the shape of the curve between measured sizes, and recent passes give its height.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.drafters.frontier import level_width
from specdec.policy.moving_average import LASTING, RECENT, saved_numbers

_RESIDENT_SLACK = 1.5
"""Maximum duration of a pass of free tokens, relative to one token, where no reads hide the
arithmetic: assumed by the plan, until passes are measured."""
_KNOTS = np.log2(np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024]))
"""Points, as log2(num_tokens), at which a pass's time is learnt."""
MAX_MEASURED_TOKENS = 1024
"""Largest pass size with a factor of its own."""
_SIZES = np.arange(1, MAX_MEASURED_TOKENS + 1)
_CLOSENESS = 0.25
"""Distance in log2(num_tokens) at which a pass counts half: kernels have steps (bench/scenarios:
with one factor for all sizes 0.95 of the speed on average, 0.80 in the worst scenario)."""
_LARGEST_LOG = 20.0
"""Bound on log(seconds of a pass) in a file: fifteen years."""
_READS = len(_KNOTS)
"""Index of the reads' factor, after those of the knots."""
MIN_STALL = 0.1
"""Minimum share of a pass's time that it waits for weights if its reads bound it (bench/scenarios:
from 0.05 to 0.2 the same within noise, with 0.3 0.99 of the speed)."""
_SHORTEST = 1e-9
"""Lower bound on the seconds of a pass, so that their logarithm is finite."""
_ROUNDING = 1.0 + 1e-9


@dataclass(eq=False)
class CostModel:
    """Seconds of a forward pass by its number of tokens.

    The plan is a roofline: max(read_seconds, min_seconds, fixed_seconds + seconds_per_token *
    num_tokens). A mixture's line has two pieces: from some number of tokens on, all experts are
    read, and further tokens cost arithmetic alone. A measured pass that waited for weights corrects
    the reads by its seconds, and the arithmetic by those in which it did not wait; another one the
    arithmetic alone. The arithmetic has a factor for each size: a weighted mean of
    log(measured / planned) over passes of every size. Weights fall with age and, steeply, with the
    distance in log2(num_tokens): a pass of another size counts only where this one was not seen for
    long.

    Args:
        read_seconds: planned for a pass whose arithmetic is hidden by its reads.
        fixed_seconds: arithmetic that does not depend on the number of tokens; below zero where
            only passes of many tokens are slowed by them.
        seconds_per_token: arithmetic of each token.
        block_size: see ModelCompute.
        all_experts: (fixed seconds, seconds per token) of passes that use all experts.
        min_seconds: arithmetic of a pass of one token, where that is more than the line has: some
            kernels compute eight rows or more.
    """

    read_seconds: float
    fixed_seconds: float
    seconds_per_token: float
    block_size: int | None = None
    all_experts: tuple[float, float] | None = None
    min_seconds: float = 0.0
    # [piece, (weight, weighted sum of log(measured / planned))]; pieces: the knots' and reads
    _sums: NDArray[np.float64] = field(init=False, repr=False)
    _factors: NDArray[np.float64] = field(init=False, repr=False)  # log of it, [piece]
    _table: NDArray[np.float64] | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        self._sums = np.zeros((_READS + 1, 2))
        self._factors = np.zeros(_READS + 1)

    def planned_seconds(self, num_tokens: int) -> float:
        """Return the planned seconds, without measurements."""
        return float(self._planned(np.float64(num_tokens)))

    def _planned(self, num_tokens: Any) -> Any:
        """Return the planned seconds of each number of tokens."""
        return np.maximum(self.read_seconds, self._line(num_tokens))

    def _line(self, num_tokens: Any) -> Any:
        """Return the planned seconds of each number of tokens where reads do not bound the pass."""
        seconds = self.fixed_seconds + self.seconds_per_token * num_tokens
        if self.all_experts is not None:
            fixed_seconds, seconds_per_token = self.all_experts
            seconds = np.minimum(seconds, fixed_seconds + seconds_per_token * num_tokens)
        return np.maximum(seconds, max(self.min_seconds, _SHORTEST))

    def _corrected(self, num_tokens: Any) -> tuple[float, Any]:
        """Return the seconds of reads, and of the line at each number of tokens, as measured."""
        factors = np.interp(np.log2(num_tokens), _KNOTS, self._factors[:_READS])
        reads = self.read_seconds * math.exp(self._factors[_READS])
        return reads, self._line(num_tokens) * np.exp(factors)

    def seconds(self, num_tokens: int) -> float:
        """Return the seconds of a pass of `num_tokens` tokens."""
        return float(np.maximum(*self._corrected(np.float64(num_tokens))))

    def extra_seconds(self, num_tokens: int) -> float:
        """Return the seconds by which `num_tokens` more tokens make a pass of one longer.

        Never less than 0: where a token costs little, the noise of measurements says that the
        larger pass were quicker, and KV of negative value is evicted first, the newest as well.
        """
        return max(0.0, self.seconds(1 + num_tokens) - self.seconds(1))

    def table(self, max_num_tokens: int) -> NDArray[np.float64]:
        """Return the seconds of passes of 1, 2, ... tokens, float64 [n].

        n is max_num_tokens, or MAX_MEASURED_TOKENS if that is less.
        """
        if self._table is None:
            self._table = np.maximum(*self._corrected(_SIZES))
        return self._table[:max_num_tokens]

    def max_num_tokens(self, seconds: float) -> int:
        """Return the tokens of the largest pass within a time; 0 if there is none."""
        within = np.flatnonzero(self.table(MAX_MEASURED_TOKENS) <= seconds * _ROUNDING)
        if len(within) < 1 or within[-1] < MAX_MEASURED_TOKENS - 1:
            return int(within[-1]) + 1 if len(within) else 0
        # Larger passes are not measured: their factor is that of the largest measured size.
        planned = seconds * _ROUNDING / math.exp(self._factors[_READS - 1])
        lines = [(self.fixed_seconds, self.seconds_per_token), self.all_experts]
        num_tokens = max(int((planned - line[0]) / line[1]) for line in lines if line is not None)
        return max(MAX_MEASURED_TOKENS, num_tokens)

    @property
    def num_tokens_of_all_experts(self) -> int:
        """Minimum tokens of a pass that uses all experts; 1 for models without any."""
        if self.all_experts is None:
            return 1
        fixed_seconds, seconds_per_token = self.all_experts
        slope = self.seconds_per_token - seconds_per_token
        if slope <= 0.0:  # experts cost less than their arithmetic: all are in memory
            return 1
        return max(1, math.ceil((fixed_seconds - self.fixed_seconds) / slope))

    @property
    def is_streamed(self) -> bool:
        """Whether every pass reads weights, so that processors wait."""
        return self.read_seconds > _SHORTEST

    @property
    def num_free_tokens(self) -> int:
        """Maximum tokens whose arithmetic is hidden by the planned reads, or within the slack."""
        one_token = self.fixed_seconds + self.seconds_per_token
        allowed = max(self.read_seconds, self.min_seconds, _RESIDENT_SLACK * one_token)
        num_tokens = (allowed - self.fixed_seconds) / self.seconds_per_token
        return max(1, int(num_tokens + 1e-6))  # against rounding below a whole number

    def to_dict(self) -> dict[str, float]:
        """Return the planned values."""
        return {
            "read_seconds": self.read_seconds,
            "fixed_seconds": self.fixed_seconds,
            "seconds_per_token": self.seconds_per_token,
            "min_seconds": self.min_seconds,
        }

    # --- measured ------------------------------------------------------------------------------

    def observe(self, num_tokens: int, seconds: float, stall_seconds: float = 0.0) -> None:
        """Correct the plan by a measured pass; one of more than MAX_MEASURED_TOKENS corrects that
        size, whose factor larger ones have.

        stall_seconds: of these, waiting for weights.
        """
        if seconds <= 0.0:
            return
        reads, _ = self._corrected(np.float64(num_tokens))
        has_waited = self.is_streamed and stall_seconds > MIN_STALL * seconds
        # Reads take no longer than the pass.
        if has_waited or reads > seconds:
            self._add(_READS, seconds / self.read_seconds)
        knot = int(np.abs(_KNOTS - np.log2(num_tokens)).argmin())
        self._sums[:_READS] *= LASTING
        busy_seconds = seconds - stall_seconds if has_waited else seconds
        self._add(knot, max(busy_seconds, _SHORTEST) / float(self._line(np.float64(num_tokens))))
        self._fit()

    def _add(self, index: int, ratio: float) -> None:
        """Add measured / planned of a piece: the index of a knot, or READS."""
        self._sums[index] *= RECENT
        self._sums[index] += (1.0, math.log(ratio))

    def state_dict(self) -> NDArray[np.float64]:
        """Return [piece, (weight, weighted sum of log seconds)], to be loaded under any plan."""
        return self._sums + np.outer(self._sums[:, 0], (0.0, 1.0)) * _log_planned(self)

    def load_state_dict(self, state_dict: object) -> None:
        """Count another process's measurements as one pass of each size. Raises ValueError."""
        sums = saved_numbers(state_dict, self._sums.shape)
        if (sums[:, 0] < 0.0).any():
            raise ValueError("weights below zero")
        sums = sums / np.maximum(sums[:, :1], 1.0)
        if (np.abs(sums[:, 1]) > _LARGEST_LOG * sums[:, 0]).any():
            raise ValueError("seconds of a pass out of range")
        self._sums = sums - np.outer(sums[:, 0], (0.0, 1.0)) * _log_planned(self)
        self._fit()

    def _fit(self) -> None:
        distances = np.abs(_KNOTS[:, None] - _KNOTS)
        closeness = np.eye(_READS + 1)
        closeness[:_READS, :_READS] = 1.0 / (1.0 + (distances / _CLOSENESS) ** 4)
        weights, ratios = (closeness @ self._sums).T
        self._factors = ratios / np.maximum(weights, 1e-9)
        self._table = None


def _log_planned(cost: CostModel) -> NDArray[np.float64]:
    """Return the log of the planned seconds of the line at the knots, and of reads, [piece, 1]."""
    line = cost._line(np.exp2(_KNOTS).round())
    return np.log([*line, cost.read_seconds or 1.0])[:, None]


def run_tokens(num_nodes: int, width: int, block_size: int | None) -> int:
    """Return the maximum tokens of one run of a draft for a tree of `num_nodes` nodes.

    width: maximum number of branches below one token; chains have one.
    """
    n_abreast = 1 if width == 1 else level_width(num_nodes)
    return block_size or max(1, min(num_nodes, n_abreast))


def run_seconds(draft_cost: CostModel, num_nodes: int, width: int) -> float:
    """Return the planned maximum seconds of one run of the draft model."""
    return draft_cost.planned_seconds(run_tokens(num_nodes, width, draft_cost.block_size))


def runs_of_levels(depth: int, block_size: int | None) -> int:
    """Return the runs of a draft for a tree of `depth` levels: one each, or one for all."""
    return depth if block_size is None else min(depth, 1)
