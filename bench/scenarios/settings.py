"""Scenarios in which the policy is tested, and the fixed tree sizes that it is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from bench.scenarios.scenario import Draft, Scenario, simulate
from specdec.config import SpecConfig
from specdec.policy.cost_model import CostModel

STREAMED = CostModel(read_seconds=1.0, fixed_seconds=0.1, seconds_per_token=0.02)
RESIDENT = CostModel(read_seconds=0.0, fixed_seconds=0.05, seconds_per_token=0.012)
FEW_FREE = CostModel(read_seconds=1.6, fixed_seconds=0.5, seconds_per_token=0.14)  # 13B Q4_0
USELESS = Draft(sharpness=0.3, bias=-4.0, coverage=0.1)  # as confident as a good one, never right
MISTAKEN = Draft(sharpness=0.3, bias=-4.0)  # its second choices are right, its first ones never

SIX: Mapping[str, Scenario] = {
    "streamed, greedy": Scenario(CostModel(1.3, 0.1, 0.012), Draft(ease=2.0, bias=0.5)),
    "streamed, sampled": Scenario(CostModel(1.3, 0.1, 0.012), Draft(ease=1.0)),
    "few free rows": Scenario(FEW_FREE, Draft(ease=2.0, bias=0.5, run_seconds=0.01)),
    "in memory": Scenario(RESIDENT, Draft(run_seconds=0.006)),
    "in memory, sure draft": Scenario(RESIDENT, Draft(ease=2.5, bias=0.5, run_seconds=0.01)),
    "n-grams, streamed": Scenario(CostModel(0.3, 0.03, 0.006), None, copied_share=0.5),
}
"""Scenarios of the six settings of the table in docs/benchmarks.md."""

REST: Mapping[str, Scenario] = {
    "fast storage": Scenario(CostModel(0.4, 0.08, 0.012), Draft(sharpness=1.3, bias=0.3)),
    "slow storage, plan far off": Scenario(CostModel(2.0, 0.1, 0.02), Draft(), planned_error=2.5),
    "arithmetic takes longer than reads": Scenario(
        CostModel(4.0, 2.5, 0.65), Draft(ease=0.0, run_seconds=0.1)
    ),
    "in memory, plan far off": Scenario(RESIDENT, Draft(run_seconds=0.006), planned_error=0.3),
    "overconfident draft": Scenario(STREAMED, Draft(ease=3.0, sharpness=0.6, bias=-1.0)),
    "underconfident draft": Scenario(STREAMED, Draft(ease=0.0, sharpness=1.5, bias=1.5)),
    "mistaken draft": Scenario(STREAMED, replace(MISTAKEN, run_seconds=0.1)),
    "expensive draft": Scenario(STREAMED, Draft(ease=2.0, run_seconds=0.4, run_node_seconds=0.002)),
    "wide levels are slow": Scenario(STREAMED, Draft(run_seconds=0.02, run_node_seconds=0.02)),
    "n-grams alone, in memory": Scenario(RESIDENT, None, copied_share=0.5),
    "n-grams and a draft": Scenario(CostModel(0.5, 0.1, 0.02), Draft(run_seconds=0.08), 0.5),
    "n-grams and a useless draft": Scenario(
        RESIDENT, replace(USELESS, run_seconds=0.02), copied_share=0.5
    ),
    "noisy passes": Scenario(STREAMED, Draft(), pass_noise=0.3, stumbles=0.1),
    "noisy, in memory": Scenario(RESIDENT, Draft(run_seconds=0.006), pass_noise=0.3, stumbles=0.1),
    "drafting ahead pays": Scenario(
        STREAMED, Draft(ease=2.0, run_seconds=0.12), hit_rate=0.8, slowdown=1.05
    ),
    "drafting ahead does not pay": Scenario(
        STREAMED, Draft(ease=2.0, run_seconds=0.12), hit_rate=0.5, slowdown=1.5
    ),
    "storage becomes slower": Scenario(STREAMED, Draft(), change_at=200, slower=4.0),
    "storage becomes quicker": Scenario(STREAMED, Draft(), change_at=200, slower=0.1),
    "the draft becomes useless": Scenario(
        RESIDENT, Draft(run_seconds=0.006), change_at=200, draft_after=USELESS
    ),
    "the draft becomes good": Scenario(
        RESIDENT,
        replace(USELESS, run_seconds=0.006),
        change_at=200,
        draft_after=Draft(run_seconds=0.006),
    ),
}

DOES_NOT_PAY: Mapping[str, Scenario] = {
    "useless, in memory": Scenario(RESIDENT, replace(USELESS, run_seconds=0.02)),
    "useless, cheap, in memory": Scenario(RESIDENT, replace(USELESS, run_seconds=0.006)),
    "useless, streamed": Scenario(STREAMED, replace(USELESS, run_seconds=0.1)),
    "useless, cheap, streamed": Scenario(STREAMED, replace(USELESS, run_seconds=0.02)),
    "useless, very dear": Scenario(STREAMED, replace(USELESS, run_seconds=0.6)),
    "slower than the target": Scenario(STREAMED, Draft(ease=1.0, run_seconds=1.5)),
    "good, a level takes 0.9 of a pass": Scenario(STREAMED, Draft(run_seconds=0.9)),
}
"""Scenarios where plain decoding is best; the policy must reach 0.95 of it over 64 tokens."""

SCENARIOS = {**SIX, **REST, **DOES_NOT_PAY}
PLAIN = SpecConfig(num_draft_tokens=0)
SIZES = ((2, 2), (4, 4), (8, 4), (16, 3), (16, 12), (32, 4), (64, 16))
"""(draft tokens, depth) of the fixed trees."""


def fixed(n_nodes: int, depth: int) -> SpecConfig:
    return SpecConfig(num_draft_tokens=n_nodes, draft_depth=depth)


class Speed(NamedTuple):
    """Tokens/s over the first `n_tokens` of several sequences, each with empty statistics."""

    n_tokens: int
    rate: float


def speeds(
    scenario: Scenario, spec: SpecConfig, lengths: Sequence[int], seeds: Sequence[int]
) -> tuple[Speed, ...]:
    outcomes = [simulate(replace(scenario, seed=seed), spec, max(lengths)) for seed in seeds]
    totals = [np.sum([outcome.at(length) for outcome in outcomes], axis=0) for length in lengths]
    return tuple(
        Speed(length, float(tokens / seconds))
        for length, (tokens, seconds) in zip(lengths, totals, strict=True)
    )


def best_fixed(
    scenario: Scenario, lengths: Sequence[int], seeds: Sequence[int]
) -> tuple[Speed, ...]:
    """Return for each length the speed of the best fixed size, plain decoding among them."""
    specs = [PLAIN, *(fixed(*size) for size in SIZES)]
    by_length = zip(*(speeds(scenario, spec, lengths, seeds) for spec in specs), strict=True)
    return tuple(max(of_length, key=lambda speed: speed.rate) for of_length in by_length)
