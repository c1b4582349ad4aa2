"""The policy in worlds of known costs and known truth (tests/policy_world.py).

In each, it must come close to the best fixed size of tree, which it does not know, and never fall
behind plain decoding, from its first token on.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from policy_world import Draft, Outcome, World, simulate

from specdec.config import SpecConfig
from specdec.policy import PassCost

N_TOKENS = 400
AHEAD = ("on", "off", "auto")
PLAIN = SpecConfig(num_draft_tokens=0)
STREAMED = PassCost(read_seconds=1.0, row_free_seconds=0.1, seconds_per_row=0.02)
RESIDENT = PassCost(read_seconds=0.0, row_free_seconds=0.05, seconds_per_row=0.012)
USELESS = Draft(sharpness=0.3, bias=-4.0, coverage=0.1)  # as sure as a good one, never right
MISTAKEN = Draft(sharpness=0.3, bias=-4.0)  # its second choices are right, its first ones never
WORLDS = {
    "slow storage": World(PassCost(2.0, 0.1, 0.02), Draft()),
    "fast storage": World(PassCost(0.4, 0.08, 0.012), Draft(sharpness=1.3, bias=0.3)),
    "in memory": World(RESIDENT, Draft(run_seconds=0.006)),
    "very good draft": World(STREAMED, Draft(ease=3.0, bias=1.0)),
    "overconfident draft": World(STREAMED, Draft(ease=3.0, sharpness=0.6, bias=-1.0)),
    "expensive draft": World(STREAMED, Draft(ease=2.0, run_seconds=0.4, run_node_seconds=0.002)),
    "n-grams alone": World(RESIDENT, None, copied_share=0.5),
    "n-grams and a draft": World(PassCost(0.5, 0.1, 0.02), Draft(run_seconds=0.08), 0.5),
    "useless draft": World(RESIDENT, replace(USELESS, run_seconds=0.02)),
    "useless draft, streamed": World(STREAMED, replace(USELESS, run_seconds=0.1)),
    "mistaken draft": World(STREAMED, replace(MISTAKEN, run_seconds=0.1)),
    "draft slower than the target": World(STREAMED, Draft(ease=1.0, run_seconds=1.5)),
}
SIZES = ((2, 2), (4, 4), (16, 3), (16, 12), (32, 4), (64, 16))
HOPELESS = ((2, 1), (8, 4))  # sizes for worlds in which plain decoding is best
# A draft that is wrong the more, the surer it is: the first texts pay for finding out.
LEARNT_FROM = {"overconfident draft": 150}


@cache
def automatic(name: str) -> Outcome:
    return simulate(WORLDS[name], SpecConfig(), N_TOKENS)


@cache
def plain(name: str) -> Outcome:
    return simulate(WORLDS[name], PLAIN, N_TOKENS)


def fixed(n_nodes: int, depth: int) -> SpecConfig:
    return SpecConfig(num_draft_tokens=n_nodes, draft_depth=depth)


@pytest.mark.parametrize("name", WORLDS)
def test_it_comes_near_the_best_fixed_size(name: str) -> None:
    first = LEARNT_FROM.get(name, 0)
    is_hopeless = name.startswith("useless") or "slower" in name
    outcomes = {
        size: simulate(WORLDS[name], fixed(*size), N_TOKENS)
        for size in (HOPELESS if is_hopeless else SIZES)
    }
    rates = {size: outcome.rate(first) for size, outcome in outcomes.items()}
    best = max(plain(name).rate(first), *rates.values())
    assert automatic(name).rate(first) > 0.95 * best, rates


@pytest.mark.parametrize("name", WORLDS)
def test_it_is_never_slower_than_plain_decoding(name: str) -> None:
    assert automatic(name).rate() > 0.95 * plain(name).rate()


def test_a_number_that_the_user_fixed_is_obeyed_though_it_does_not_pay() -> None:
    outcome = simulate(WORLDS["useless draft"], fixed(8, 4), 60)
    assert set(outcome.sizes) == {8}


# --- changes of regime, at the 300th of 700 tokens ------------------------------------------------

CHANGE, LEARNT, END = 300, 420, 700
CHANGES = {
    "storage becomes slower": World(STREAMED, Draft(), change_at=CHANGE, slower=4.0),
    "the draft becomes useless": World(
        RESIDENT, Draft(run_seconds=0.006), change_at=CHANGE, draft_after=USELESS
    ),
    "the draft becomes good, in memory": World(
        RESIDENT,
        replace(USELESS, run_seconds=0.006),
        change_at=CHANGE,
        draft_after=Draft(run_seconds=0.006),
    ),
    "the draft becomes good, streamed": World(
        STREAMED,
        replace(USELESS, run_seconds=0.1),
        change_at=CHANGE,
        draft_after=Draft(run_seconds=0.1),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_followed(name: str) -> None:
    """Some rounds after the change the speed is near that of the best size for the new regime."""
    world = CHANGES[name]
    is_hopeless = world.draft_after is USELESS
    sizes = () if is_hopeless else ((4, 4), (32, 8), (64, 16))
    specs = [PLAIN, *(fixed(*size) for size in sizes)]
    best = max(simulate(world, spec, END).rate(LEARNT) for spec in specs)
    assert simulate(world, SpecConfig(), END).rate(LEARNT) > 0.9 * best


# --- drafting ahead -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slowdown", "hit_rate", "is_better"), [(1.05, 0.8, True), (1.6, 0.8, False), (1.3, 0.0, False)]
)
def test_drafting_ahead_is_chosen_where_it_pays(slowdown, hit_rate, is_better) -> None:
    draft = Draft(ease=2.0, run_seconds=0.12)
    world = World(STREAMED, draft, slowdown=slowdown, hit_rate=hit_rate)
    rates = {kind: simulate(world, SpecConfig(draft_ahead=kind), 600).rate() for kind in AHEAD}
    assert (rates["on"] > rates["off"]) == is_better
    # The first rounds go without, and trees grow from what the plan thinks free.
    assert rates["auto"] > 0.9 * max(rates["on"], rates["off"])
