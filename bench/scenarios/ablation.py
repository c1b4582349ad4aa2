"""Ablation of the policy: scenarios decoded with one part switched off.

    python -m bench.scenarios.ablation [PART ...]

In virtual time, on one thread: neither models nor an idle machine are needed. Prints a table in
Markdown, of all parts or of the named ones.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from bench.scenarios.settings import DOES_NOT_PAY, SCENARIOS, SIX, best_fixed, speeds
from specdec.config import SpecConfig
from specdec.policy import calibration, cost_model, draft_policy, modes, shared_step, tree_shape
from specdec.policy.calibration import Calibration
from specdec.policy.cost_model import CostModel
from specdec.policy.pair_statistics import AcceptanceStatistics, PairStatistics

SHORT, MEDIUM = 64, 400  # tokens of a sequence
SEEDS = range(8000, 8004)  # nothing was tuned on them

Patch = tuple[Any, str, Any]  # object, attribute, replacement


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


_biases = calibration._biases


def _one_bias_for_all(buckets: Any) -> Any:
    return np.full(len(buckets), _biases(buckets.sum(axis=0, keepdims=True)))


NOTHING: Any = lambda *_: None  # noqa: E731
ANYTHING: Any = property(lambda _: 10**9)
PARTS: Mapping[str, Sequence[Patch]] = {
    "marginal gain per depth (the draft's own probability instead)": [
        (tree_shape, "note_levels", NOTHING)
    ],
    "calibration": [(Calibration, "observe", NOTHING)],
    "calibration by buckets (one bias for all)": [(calibration, "_biases", _one_bias_for_all)],
    "measured times of drafting (the plan's instead)": [(PairStatistics, "note_drafting", NOTHING)],
    "measured times of passes (the plan's instead)": [(CostModel, "observe", NOTHING)],
    "times by size of the pass (one factor instead)": [(cost_model, "_CLOSENESS", math.inf)],
    "what passes wait for (all are bound by arithmetic)": [(cost_model, "MIN_STALL", math.inf)],
    "the bound on outliers of pass times": [(shared_step, "_MAX_OUTLIER", math.inf)],
    "slow start, and no more candidates than of use": [
        (AcceptanceStatistics, "n_candidates", ANYTHING)
    ],
    "the exploration budget of a draft": [(modes, "FIRST_BUDGET", 1e9)],
    "the plan's weight of four steps (of half a step)": [(modes, "_PLAN_WEIGHT", 0.5)],
    "n-grams' tokens left out of the draft's account": [
        (draft_policy, "_accepted_without_draft", lambda *_: 0),
        (draft_policy, "_is_proposed_without_draft", lambda _: False),
    ],
    "parallel drafting": [(CostModel, "is_streamed", property(lambda _: False))],
}


# --- the table -----------------------------------------------------------------------------------

Rates = dict[tuple[str, int], float]  # (scenario, tokens) -> tokens per second


def automatic() -> Rates:
    return {
        (name, speed.n_tokens): speed.rate
        for name, scenario in SCENARIOS.items()
        for speed in speeds(scenario, SpecConfig(), (SHORT, MEDIUM), SEEDS)
    }


def best() -> Rates:
    return {
        (name, speed.n_tokens): speed.rate
        for name, scenario in SCENARIOS.items()
        for speed in best_fixed(scenario, (SHORT, MEDIUM), SEEDS)
    }


def row(name: str, result: Rates, full: Rates, fixed: Rates) -> str:
    to_full = {key: result[key] / full[key] for key in result}
    to_fixed = {key: result[key] / fixed[key] for key in result}
    worst = min(to_full, key=to_full.__getitem__)
    six = min(to_fixed[scenario, MEDIUM] for scenario in SIX)
    useless = min(to_fixed[scenario, SHORT] for scenario in DOES_NOT_PAY)
    mean = {n: np.mean([v for (_, m), v in to_full.items() if m == n]) for n in (SHORT, MEDIUM)}
    results = (*mean.values(), to_full[worst], np.mean(list(to_fixed.values())), six, useless)
    short, medium, at_worst, *rest = (f"{figure:.3f}" for figure in results)
    where = f"{at_worst} ({worst[0]}, {worst[1]})"
    return f"| {name} | {short} | {medium} | {where} | " + " | ".join(rest) + " |"


def main(requested: Sequence[str]) -> None:
    print(
        "| without | 64 tokens | 400 tokens | worst (scenario, tokens) "
        "| of the best fixed size | six settings | useless drafts |\n|---|---|---|---|---|---|---|"
    )
    full, fixed = automatic(), best()
    print(row("nothing: the whole policy", full, full, fixed), flush=True)
    for name, patches in PARTS.items():
        if not requested or any(word in name for word in requested):
            with patched(patches):
                print(row(name, automatic(), full, fixed), flush=True)
    for key, rate in full.items():
        print(
            f"{key[0]}, {key[1]}: {rate / fixed[key]:.3f} of the best fixed size", file=sys.stderr
        )


if __name__ == "__main__":
    main(sys.argv[1:])
