"""The policy in simulation scenarios of known costs and acceptance (bench/scenarios).

In each, it must come close to the best fixed size of tree, which it does not know, and never fall
behind plain decoding, from its first token on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from bench.scenarios.scenario import MAX_NODES, Draft, Scenario, simulate
from bench.scenarios.settings import (
    DOES_NOT_PAY,
    PLAIN,
    RESIDENT,
    REST,
    SCENARIOS,
    SIX,
    STREAMED,
    USELESS,
    best_fixed,
    fixed,
    speeds,
)
from specdec.config import SpecConfig
from specdec.policy import pair_statistics
from specdec.policy.cost_model import CostModel
from specdec.policy.moving_average import LASTING, MovingAverage
from specdec.policy.pair_statistics import PairStatistics

SHORT, MEDIUM = 64, 400  # tokens of an output
SEEDS = range(8)
MANY_SEEDS = range(32)
FEW_SEEDS = range(3)
AHEAD = ("on", "off", "auto")


def rates(
    scenario: Scenario, spec: SpecConfig, *lengths: int, seeds: Sequence[int] = SEEDS
) -> list:
    return [speed.rate for speed in speeds(scenario, spec, lengths, seeds)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SIX)
def test_it_comes_near_the_best_fixed_size(name: str) -> None:
    """The goal is 0.97. Processors round differently, which changes the course of a simulation:
    means of eight seeds lie between 0.958 and 0.990 in memory with a sure draft, of 32 at 0.972
    (an EPYC of Zen 5)."""
    (best,) = best_fixed(SIX[name], (MEDIUM,), MANY_SEEDS)
    assert rates(SIX[name], SpecConfig(), MEDIUM, seeds=MANY_SEEDS)[0] > 0.95 * best.rate


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("name", REST)
def test_it_does_so_where_drafts_and_plans_mislead(name: str) -> None:
    """With random delays of passes, three seeds are too few: processors round differently, and one
    such pass changes the course of a simulation (0.83 of the best with three, 0.90 with eight,
    on an EPYC of Zen 4)."""
    seeds = SEEDS if "noisy" in name else FEW_SEEDS
    (best,) = best_fixed(REST[name], (MEDIUM,), seeds)
    assert rates(REST[name], SpecConfig(), MEDIUM, seeds=seeds)[0] > 0.88 * best.rate


@pytest.mark.slow
def test_passes_that_take_longer_than_planned_do_not_hide_what_smaller_ones_take() -> None:
    """Trees of four nodes, whose arithmetic takes longer than planned, took as long as such a pass
    with slow reads would, and smaller ones were never tried: 0.92 of the best."""
    scenario = REST["arithmetic takes longer than reads"]
    (best,) = best_fixed(scenario, (MEDIUM,), MANY_SEEDS)
    assert rates(scenario, SpecConfig(), MEDIUM, seeds=MANY_SEEDS)[0] > 0.96 * best.rate


@pytest.mark.slow_except(5)
@pytest.mark.parametrize("name", SCENARIOS)
def test_it_is_never_slower_than_plain_decoding(name: str) -> None:
    actual = rates(SCENARIOS[name], SpecConfig(), SHORT, MEDIUM, seeds=FEW_SEEDS)
    plain = rates(SCENARIOS[name], PLAIN, SHORT, MEDIUM, seeds=FEW_SEEDS)
    assert all(rate > 0.9 * other for rate, other in zip(actual, plain, strict=True))


# --- short sequences, in a fresh process ----------------------------------------------------------


def hardly_right(percent: int, run_seconds: float) -> Draft:
    """A draft whose best candidate is right in this many of a hundred places."""
    bias = {5: -3.4, 10: -2.65, 15: -2.2}[percent]
    return Draft(sharpness=0.3, bias=bias, coverage=0.1, run_seconds=run_seconds)


# Drafts that are not worth their time, by the time of a level.
SHORT_USELESS = {
    **DOES_NOT_PAY,
    "dear, useless draft": Scenario(STREAMED, replace(USELESS, run_seconds=0.3)),
    "good, but a level takes 0.6 of a pass in memory": Scenario(RESIDENT, Draft(run_seconds=0.04)),
    "good, but a level takes all of a pass in memory": Scenario(RESIDENT, Draft(run_seconds=0.06)),
    "fair, but a level takes half of a pass in memory": Scenario(
        RESIDENT, Draft(ease=0.0, run_seconds=0.03)
    ),
} | {
    f"right in {percent} %, levels of {seconds} s, {place}": Scenario(
        target, hardly_right(percent, seconds)
    )
    for percent in (5, 10, 15)
    for place, target, costs in (
        ("streamed", STREAMED, (0.1, 0.3)),
        ("in memory", RESIDENT, (0.006, 0.02)),
    )
    for seconds in costs
}


@pytest.mark.slow
def test_drafts_that_do_not_pay_cost_little_of_a_short_sequence() -> None:
    """A draft whose level takes much of a pass costs more than the mean (0.92, very dear)."""
    ratios = []
    for scenario in SHORT_USELESS.values():
        actual = rates(scenario, SpecConfig(), SHORT, 2 * SHORT)
        plain = rates(scenario, PLAIN, SHORT, 2 * SHORT)
        ratios.append([rate / other for rate, other in zip(actual, plain, strict=True)])
    assert np.mean(ratios, axis=0).min() > 0.95
    assert np.min(ratios) > 0.9


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("name", ["useless, streamed", "useless, cheap, in memory"])
def test_neither_does_one_whose_depth_the_user_fixed(name: str, depth: int) -> None:
    """All levels at once: 0.950 with three of them, over several sets of seeds."""
    scenario = SHORT_USELESS[name]
    (rate,) = rates(scenario, SpecConfig(draft_depth=depth), SHORT)
    assert rate > 0.945 * rates(scenario, PLAIN, SHORT)[0]


@pytest.mark.slow
def test_good_drafts_are_used_within_a_short_sequence() -> None:
    ratios = []
    for scenario in SIX.values():
        (best,) = best_fixed(scenario, (SHORT,), SEEDS)
        ratios.append(rates(scenario, SpecConfig(), SHORT)[0] / best.rate)
    assert np.mean(ratios) > 0.95
    assert min(ratios) > 0.88


def test_a_number_that_the_user_fixed_is_obeyed_though_it_does_not_pay() -> None:
    outcome = simulate(SCENARIOS["useless, in memory"], fixed(8, 4), 60)
    assert set(outcome.sizes) == {8}


def test_levels_that_seemed_to_gain_nothing_are_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = simulate(SIX["streamed, greedy"], SpecConfig(), 800).rate(500)
    gains = MovingAverage(LASTING, (-5.0,), weight=8.0)
    monkeypatch.setattr(pair_statistics, "depth_gain", lambda: gains)
    assert simulate(SIX["streamed, greedy"], SpecConfig(), 800).rate(500) > 0.95 * usual


# --- changes of regime, at the 300th of 700 tokens ------------------------------------------------

CHANGE, LEARNT, END = 300, 420, 700
CHANGES = {
    "storage becomes slower": Scenario(STREAMED, Draft(), change_at=CHANGE, slower=4.0),
    "the draft becomes useless": Scenario(
        RESIDENT, Draft(run_seconds=0.006), change_at=CHANGE, draft_after=USELESS
    ),
    "the draft becomes good, in memory": Scenario(
        RESIDENT,
        replace(USELESS, run_seconds=0.006),
        change_at=CHANGE,
        draft_after=Draft(run_seconds=0.006),
    ),
    "the draft becomes good, streamed": Scenario(
        STREAMED,
        replace(USELESS, run_seconds=0.1),
        change_at=CHANGE,
        draft_after=Draft(run_seconds=0.1),
    ),
}


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_followed(name: str) -> None:
    """Some steps after the change the speed is near that of the best size for the new regime."""
    scenario = CHANGES[name]
    is_hopeless = scenario.draft_after is USELESS
    sizes = () if is_hopeless else ((4, 4), (32, 8))
    specs = [PLAIN, *(fixed(*size) for size in sizes)]
    ratios = []
    for item in (replace(scenario, seed=seed) for seed in range(3)):
        best = max(simulate(item, spec, END).rate(LEARNT) for spec in specs)
        ratios.append(simulate(item, SpecConfig(), END).rate(LEARNT) / best)
    assert sum(ratios) / len(ratios) > 0.9


# --- parallel drafting ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, (16, 6)], ids=["automatic", "fixed"])
@pytest.mark.parametrize(("target", "same_as"), [(STREAMED, "on"), (RESIDENT, "off")])
def test_trees_are_drafted_ahead_where_the_target_streams(target, same_as, size) -> None:
    draft = Draft(ease=2.0, run_seconds=0.12 * target.seconds(1))
    scenario = Scenario(target, draft, slowdown=1.05, hit_rate=0.8)
    spec = SpecConfig() if size is None else fixed(*size)
    rates = {
        kind: simulate(scenario, replace(spec, draft_ahead=kind), 600).rate() for kind in AHEAD
    }
    assert rates["on"] > rates["off"]
    if size is None:  # it does not run in steps without the draft
        assert rates["auto"] == pytest.approx(rates[same_as], rel=0.05)
    else:
        assert rates["auto"] == rates[same_as]


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("planned_error", [1.0, 2.5])
def test_a_costly_draft_is_retained_though_n_grams_are_lucky_at_times(planned_error: float) -> None:
    """Eight levels take as long as a pass, and the output copies short passages."""
    target = CostModel(read_seconds=0.17, fixed_seconds=0.15, seconds_per_token=0.006)
    draft = Draft(ease=2.0, run_seconds=0.021)
    scenario = Scenario(
        target,
        draft,
        copied_share=0.3,
        passage=(5, 16),
        planned_error=planned_error,
        pass_noise=0.1,
        hit_rate=0.6,
        slowdown=1.12,
        max_nodes=8,
    )
    best = replace(fixed(8, 8), draft_ahead="on")
    ratios = []
    for item in (replace(scenario, seed=seed) for seed in range(16)):
        ratios.append(simulate(item, SpecConfig(), 384).rate() / simulate(item, best, 384).rate())
    assert sum(ratios) / len(ratios) > 0.9
    assert min(ratios) > 0.75


def test_passes_are_followed_while_drafting_goes_on_beside_them() -> None:
    """Storage becomes four times as slow while all passes have drafting beside them."""
    draft = Draft(ease=2.0, run_seconds=0.12)
    scenario = Scenario(
        STREAMED, draft, slowdown=1.1, hit_rate=0.9, change_at=300, slower=4.0, planned_error=0.7
    )
    spec, n_tokens = SpecConfig(draft_ahead="on"), 520
    actual = []
    for seed in SEEDS:
        pair_statistics = PairStatistics(scenario.planned(), scenario.planned_draft(), MAX_NODES)
        simulate(replace(scenario, seed=seed), spec, n_tokens, pair_statistics)
        actual.append(pair_statistics.cost.seconds(12))
    assert sum(actual) / len(actual) == pytest.approx(4.0 * 1.1, rel=0.2)
