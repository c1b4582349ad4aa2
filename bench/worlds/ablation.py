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
from specdec.policy import calibration, costs, modes, shared_round
from specdec.policy.calibration import Calibration, LevelYield
from specdec.policy.costs import DraftTimes, PassTimes
from specdec.policy.experience import Lessons
from specdec.policy.modes import AheadChoice, DraftChoice, Way

SHORT, MEDIUM = 64, 400  # tokens of a text
SEEDS = range(3000, 3004)  # nothing was tuned on them

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


def _common_shift_alone(buckets: Any) -> Any:
    tries, hits, sums = buckets.T
    logits = calibration._logits(sums / np.maximum(tries, 1e-9))
    return np.full(len(buckets), calibration._common_shift(tries, hits, logits))


ANYTHING: Any = property(lambda _: 10**9)
PARTS: Mapping[str, Sequence[Patch]] = {
    "the yield of levels (the draft's own probability instead)": [
        (LevelYield, "draft_probability", lambda _, gain: min(gain, 1.0))
    ],
    "calibration": [(Calibration, "observe", lambda *_: None)],
    "calibration by buckets (one shift for all)": [(calibration, "_shifts", _common_shift_alone)],
    "the common shift of all buckets": [(calibration, "_common_shift", lambda *_: 0.0)],
    "measured times of drafting (the plan's instead)": [(DraftTimes, "observe", lambda *_: None)],
    "measured times of passes (the plan's instead)": [(PassTimes, "observe", lambda *_: None)],
    "times by size of the pass (one factor instead)": [(costs, "_CLOSENESS", math.inf)],
    "the bound on what a disturbed pass counts": [
        (costs, "STUMBLE", math.inf),
        (shared_round, "STUMBLE", math.inf),
    ],
    "slow start, and no more candidates than of use": [(Lessons, "n_candidates", ANYTHING)],
    "the credit of a draft": [
        (DraftChoice, "stake_seconds", property(lambda _: 1e9)),
        (modes, "_FIRST_CREDIT", 1e9),
    ],
    "small trees while the credit is small": [
        (DraftChoice, "stake_seconds", property(lambda _: 1e9))
    ],
    "trials of the way not in use": [(Way, "may_be_tried", lambda *_: False)],
    "the plan's word for four rounds (for half a round)": [(modes, "_PLAN_WEIGHT", 0.5)],
    "drafting ahead": [(AheadChoice, "next_is_ahead", lambda *_: False)],
    "the choice of drafting ahead (always)": [(AheadChoice, "next_is_ahead", lambda *_: True)],
}


# --- the table -----------------------------------------------------------------------------------

Rates = dict[tuple[str, int], float]  # (world, tokens) -> tokens per second


def automatic() -> Rates:
    return {
        (name, speed.n_tokens): speed.rate
        for name, world in WORLDS.items()
        for speed in speeds(world, SpecConfig(), (SHORT, MEDIUM), SEEDS)
    }


def best() -> Rates:
    return {
        (name, speed.n_tokens): speed.rate
        for name, world in WORLDS.items()
        for speed in best_fixed(world, (SHORT, MEDIUM), SEEDS)
    }


def row(name: str, found: Rates, full: Rates, fixed: Rates) -> str:
    to_full = {key: found[key] / full[key] for key in found}
    to_fixed = {key: found[key] / fixed[key] for key in found}
    worst = min(to_full, key=to_full.__getitem__)
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
