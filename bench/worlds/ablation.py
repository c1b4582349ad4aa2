"""What each part of the policy brings: worlds decoded with that part switched off.

    python -m bench.worlds.ablation [PART ...]

In virtual time, on one thread: neither models nor an idle machine are needed. Prints a table in
Markdown; a part that is named alone is judged alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from bench.worlds.settings import NOT_WORTH_IT, SIX, WORLDS, best_fixed, speeds
from specdec.config import SpecConfig
from specdec.policy import ahead_choice, calibration, costs, draft_choice, draft_policy, tree_shape
from specdec.policy.ahead_choice import AheadChoice
from specdec.policy.calibration import Calibration
from specdec.policy.costs import DraftTimes, PassTimes
from specdec.policy.draft_choice import DraftChoice, Pace, RegretBudget
from specdec.policy.lessons import Lessons, LevelYield

SHORT, MEDIUM, LONG = 64, 400, 1000  # tokens of a text
SEEDS = range(1000, 1002)  # nothing was tuned on them
LONG_WORLDS = ("streamed, greedy", "in memory", "useless, in memory", "n-grams and a draft")

Patch = tuple[Any, str, Any]  # object, attribute, what it is meanwhile


@contextmanager
def patched(patches: Sequence[Patch]) -> Iterator[None]:
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in patches]
    for owner, name, value in patches:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


# --- simpler stand-ins for what is switched off --------------------------------------------------


def _shifts_of_the_source(cells: Any) -> Any:
    tries, hits, sums = np.moveaxis(cells, 2, 0)
    tries, hits, sums = tries.sum(0), hits.sum(0), sums.sum(0)
    logits = calibration._logits(sums / np.maximum(tries, 1e-9))
    whole = calibration._source_shift(tries, hits, logits)
    return np.full(cells.shape[:2], whole)


def _shifts_of_buckets(cells: Any) -> Any:
    tries, hits, sums = np.moveaxis(cells, 2, 0)
    tries, hits, sums = tries.sum(0), hits.sum(0), sums.sum(0)
    mean = sums / np.maximum(tries, 1e-9)
    whole = calibration._source_shift(tries, hits, calibration._logits(mean))
    found = calibration._smoothed_shift(tries, hits, mean, whole, calibration._POOLED_STRENGTH)
    return np.broadcast_to(found, cells.shape[:2])


def _shifts_of_source_and_depth(cells: Any) -> Any:
    """Without the buckets: a shift of the source, then one of each depth."""
    tries, hits, sums = np.moveaxis(cells, 2, 0)
    logits = calibration._logits(sums / np.maximum(tries, 1e-9))
    return np.array(
        [
            np.full(cells.shape[1], calibration._source_shift(*of_depth))
            for of_depth in zip(tries, hits, logits, strict=True)
        ]
    )


def _mean_run(self: DraftTimes) -> None:
    if not self._is_fitted:
        runs = sum(draft[1] for draft in self._drafts)
        self._parts = np.array([0.0, sum(draft[3] for draft in self._drafts) / runs, 0.0])
        self._is_fitted = True


def _least_squares_fit(sizes: Any, times: Any, prior: Any) -> Any:
    """Without the reweighting."""
    gram = sizes.T @ sizes + costs._PULL * np.eye(len(prior))
    return costs._least_squares(gram, sizes.T @ times + costs._PULL * prior)


def _one_factor(self: PassTimes) -> None:
    """A fading mean over passes of all sizes."""
    is_filled = np.isfinite(self._births)
    ages = self._n_passes - self._births[is_filled]
    weights = np.exp2(-ages / 8.0)
    factor = float(weights @ self._ratios[is_filled] / weights.sum())
    self._seconds = self._prior * math.exp(factor)
    self._evidence = np.full(len(self._rows), float(weights.sum()))


def _weighted_mean(self: PassTimes) -> None:
    """A mean where the policy takes the median."""
    is_filled = np.isfinite(self._births)
    ages = self._n_passes - self._births[is_filled]
    distances = np.abs(costs._KNOTS[:, None] - self._log_rows[is_filled])
    weights = np.exp2(-ages / costs._HALF_LIFE) / (1.0 + (distances / costs._CLOSENESS) ** 4)
    log_rows = np.log2(self._rows)
    factors = weights @ self._ratios[is_filled] / weights.sum(1)
    self._seconds = self._prior * np.exp(np.interp(log_rows, costs._KNOTS, factors))
    self._evidence = np.interp(log_rows, costs._KNOTS, weights.sum(1))


class _Unlimited(RegretBudget):
    def __init__(self, _: float) -> None:
        super().__init__(math.inf)

    def limit(self, at_most: float) -> None:
        """Never."""


NEVER: Any = property(lambda _: False)
PARTS: Mapping[str, Sequence[Patch]] = {
    "level yield (the draft's own probability instead)": [
        (LevelYield, "draft_probability", lambda _, gain: min(gain, 1.0))
    ],
    "calibration: none at all": [(Calibration, "observe", lambda *_: None)],
    "calibration: the source's shift alone": [(calibration, "_shifts", _shifts_of_the_source)],
    "calibration: source and bucket, no depth": [(calibration, "_shifts", _shifts_of_buckets)],
    "calibration: source and depth, no bucket": [
        (calibration, "_shifts", _shifts_of_source_and_depth)
    ],
    "calibration: bucket and depth, no source": [(calibration, "_source_shift", lambda *_: 0.0)],
    "draft times: mean per run": [(DraftTimes, "_fit", _mean_run)],
    "draft times: least squares": [(costs, "_least_deviations", _least_squares_fit)],
    "draft times: the plan's": [(DraftTimes, "observe", lambda *_: None)],
    "pass times: the plan's": [(PassTimes, "_fit", lambda _: None)],
    "pass times: one factor for all sizes": [(PassTimes, "_fit", _one_factor)],
    "pass times: mean for median": [(PassTimes, "_fit", _weighted_mean)],
    "hysteresis of the draft choice": [(draft_choice, "_HYSTERESIS", 1.0)],
    "probes of the other mode": [(DraftChoice, "_may_probe", lambda *_: False)],
    "regret budget": [
        (draft_choice, "RegretBudget", _Unlimited),
        (DraftChoice, "is_on_trial", NEVER),
    ],
    "trials with small trees": [(DraftChoice, "is_on_trial", NEVER)],
    "trial trees of 16 nodes (the stake alone)": [(tree_shape, "_TRIAL_NODES", 10**9)],
    "pace: later rounds count more": [
        (draft_choice, "_FADE_AT_FIRST", draft_choice._FADE_IN_USE),
        (draft_choice, "_FADE_IDLE", 1.0),
    ],
    "pace: one fade of 0.9": [
        (draft_choice, "_FADE_AT_FIRST", 0.9),
        (draft_choice, "_FADE_STEP", 0.0),
        (draft_choice, "_FADE_IN_USE", 0.9),
        (draft_choice, "_FADE_IDLE", 1.0),
    ],
    "pace: bias (expected tokens alone)": [
        (Pace, "tokens", property(lambda self: self._expected / self._n))
    ],
    "pace: expectation (what came out alone)": [
        (Pace, "tokens", property(lambda self: self._actual / self._n))
    ],
    "halved trees, one in 16": [(Lessons, "should_vary_size", lambda _: False)],
    "candidates: somewhat more than before": [(Lessons, "n_candidates", lambda _, most: most)],
    "stumbles": [(draft_policy, "_STUMBLE", math.inf)],
    "growth by 4 at most": [(draft_policy, "_GROWTH", 10**9)],
    "optimism": [(tree_shape, "_OPTIMISM", 0.0)],
    "drafting ahead": [(AheadChoice, "next_is_ahead", lambda _: False)],
    "trials of drafting ahead (always ahead)": [(AheadChoice, "next_is_ahead", lambda _: True)],
    "ahead: share and intervals": [
        (ahead_choice, "_SHARE", 1e9),
        (ahead_choice, "FIRST_INTERVAL", 32),
        (ahead_choice, "LONGEST_INTERVAL", 32),
    ],
}


# --- the table -----------------------------------------------------------------------------------

Rates = dict[tuple[str, int], float]  # (world, tokens) -> tokens per second


def lengths_of(name: str) -> tuple[int, ...]:
    return (SHORT, MEDIUM, LONG) if name in LONG_WORLDS else (SHORT, MEDIUM)


def automatic() -> Rates:
    return {
        (name, speed.n_tokens): speed.rate
        for name, world in WORLDS.items()
        for speed in speeds(world, SpecConfig(), lengths_of(name), SEEDS)
    }


def best() -> Rates:
    return {
        (name, speed.n_tokens): speed.rate
        for name, world in WORLDS.items()
        for speed in best_fixed(world, lengths_of(name), SEEDS)
    }


def row(name: str, found: Rates, full: Rates, fixed: Rates) -> str:
    to_full = {key: found[key] / full[key] for key in found}
    to_fixed = {key: found[key] / fixed[key] for key in found}
    worst = min(to_full, key=lambda key: to_full[key])
    six = min(to_fixed[world, MEDIUM] for world in SIX)
    useless = min(to_fixed[world, SHORT] for world in NOT_WORTH_IT)
    mean = {n: np.mean([v for (_, m), v in to_full.items() if m == n]) for n in (SHORT, MEDIUM)}
    figures = (*mean.values(), to_full[worst], np.mean(list(to_fixed.values())), six, useless)
    short, medium, at_worst, *rest = (f"{figure:.3f}" for figure in figures)
    where = f"{at_worst} ({worst[0]}, {worst[1]})"
    return f"| {name} | {short} | {medium} | {where} | " + " | ".join(rest) + " |"


def main(wanted: Sequence[str]) -> None:
    print(
        "| without | 64 tokens | 400 tokens | worst (world, tokens) "
        "| of the best fixed size | six settings | useless drafts |\n|---|---|---|---|---|---|---|"
    )
    full, fixed = automatic(), best()
    print(row("nothing: the whole policy", full, full, fixed), flush=True)
    for name, patches in PARTS.items():
        if not wanted or any(word in name for word in wanted):
            with patched(patches):
                print(row(name, automatic(), full, fixed), flush=True)
    for key, rate in full.items():
        print(
            f"{key[0]}, {key[1]}: {rate / fixed[key]:.3f} of the best fixed size", file=sys.stderr
        )


if __name__ == "__main__":
    main(sys.argv[1:])
