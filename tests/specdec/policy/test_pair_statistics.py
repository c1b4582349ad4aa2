"""Acceptance statistics of a pair pass to the next process, and a broken file is ignored."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.scenarios.scenario import MAX_NODES, Scenario, simulate
from bench.scenarios.settings import SIX
from specdec.config import SpecConfig
from specdec.policy.cost_model import CostModel
from specdec.policy.pair_statistics import PairStatistics, pair_statistics_of

COST, DRAFT = CostModel(1.0, 0.2, 0.05), CostModel(0.02, 0.0, 1e-6)
SCENARIO = SIX["streamed, greedy"]


def fresh(scenario: Scenario, state_dict: Any = None) -> PairStatistics:
    return pair_statistics_of(scenario.planned(), scenario.planned_draft(), MAX_NODES, state_dict)


def learnt(scenario: Scenario, n_tokens: int = 200) -> Any:
    """The file's content after a generation."""
    pair_statistics = fresh(scenario)
    simulate(replace(scenario, seed=77), SpecConfig(), n_tokens, pair_statistics)
    return json.loads(json.dumps(pair_statistics.state_dict()))


def test_times_are_known_in_the_next_process_though_its_plan_is_another_one() -> None:
    pair_statistics = PairStatistics(COST, DRAFT, 32)
    for _ in range(5):
        pair_statistics.cost.observe(17, 3.0)
        pair_statistics.note_drafting(4, 0.4)
    state_dict = json.loads(json.dumps(pair_statistics.state_dict()))
    other = pair_statistics_of(CostModel(2.0, 0.4, 0.1), DRAFT, 32, state_dict)
    assert other.cost.seconds(17) == pytest.approx(3.0, rel=0.02)
    assert other.draft_pass_seconds == pytest.approx(pair_statistics.draft_pass_seconds)


def test_cached_statistics_count_little_against_measurements() -> None:
    pair_statistics = PairStatistics(COST, DRAFT, 32)
    for _ in range(50):
        pair_statistics.cost.observe(17, 1.0)
    again = pair_statistics_of(COST, DRAFT, 32, pair_statistics.state_dict())
    for _ in range(8):
        again.cost.observe(17, 3.0)
    assert again.cost.seconds(17) > 2.3


def test_another_plan_goes_on_from_the_acceptance_and_not_from_the_speeds() -> None:
    pair_statistics, known = fresh(SCENARIO), fresh(SCENARIO, learnt(SCENARIO))
    pair_statistics.learn_on(known)
    actual, expected = (x.state_dict() for x in (pair_statistics, known))
    assert actual["acceptance"].keys() == expected["acceptance"].keys() != set()
    for key, state_dict in actual["acceptance"].items():
        assert state_dict == {**expected["acceptance"][key], "choices": {}}
    assert actual["passes"] == fresh(SCENARIO).state_dict()["passes"]
    before = known.state_dict()
    known.learn_on(fresh(SCENARIO))
    known.learn_on(pair_statistics)
    assert known.state_dict() == before


def test_caching_a_prefix_twice_changes_nothing() -> None:
    state_dict = learnt(SCENARIO)
    assert (
        fresh(SCENARIO, state_dict).state_dict()["acceptance"].keys()
        == state_dict["acceptance"].keys()
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)


@given(st.data())
def test_a_broken_file_is_ignored(data: st.DataObject) -> None:
    """Any part of the file is replaced by anything."""
    state_dict = learnt_once()
    place: Any = state_dict
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(JSON)
    outcome = simulate(SCENARIO, SpecConfig(), 20, fresh(SCENARIO, state_dict))
    assert outcome.counts[-1] >= 20


def learnt_once(_cache: list[str] = []) -> Any:  # noqa: B006 (kept on purpose)
    if not _cache:
        _cache.append(json.dumps(learnt(SCENARIO)))
    return json.loads(_cache[0])


@pytest.mark.parametrize(
    "state_dict", [None, 7, [], {}, {"version": 3}, {"version": 4}, "x", float("nan")]
)
def test_anything_else_is_no_experience(state_dict: Any) -> None:
    assert fresh(SCENARIO, state_dict).state_dict() == fresh(SCENARIO).state_dict()


def test_another_version_is_not_used() -> None:
    """The previous version, for example, measured parallel drafting."""
    state_dict = {**learnt_once(), "version": 3, "ahead": [[1.0, 0.1]] * 3}
    assert fresh(SCENARIO, state_dict).state_dict() == fresh(SCENARIO).state_dict()


@pytest.mark.parametrize("chain", [[8.0, 9.0], [8.0, -1.0], [0.0, 0.0]])
def test_a_broken_share_of_chains_is_learnt_again(chain: list[float]) -> None:
    state_dict = learnt_once()
    for acceptance_statistics in state_dict["acceptance"].values():
        acceptance_statistics["chain"] = chain
    pair_statistics = fresh(SCENARIO, state_dict)
    simulate(SCENARIO, SpecConfig(), 20, pair_statistics)
    (acceptance_statistics,) = pair_statistics.state_dict()["acceptance"].values()
    assert acceptance_statistics["chain"] == pytest.approx([8.0, 8.0 * 0.85])


def test_it_is_bounded() -> None:
    pair_statistics = PairStatistics(COST, DRAFT, 1024)
    simulate(SCENARIO, SpecConfig(), 100, pair_statistics)
    (acceptance_statistics,) = pair_statistics.state_dict()["acceptance"].values()
    many = {
        **pair_statistics.state_dict(),
        "acceptance": {str(i): acceptance_statistics for i in range(1000)},
    }
    assert len(json.dumps(pair_statistics_of(COST, DRAFT, 1024, many).state_dict())) < 100_000


def first_steps(
    scenario: Scenario, seed: int, state_dict: Any, n_steps: int = 4
) -> tuple[int, int]:
    """Return (tokens of the first steps, tokens of fixed trees of 64 nodes in the same places)."""
    item = replace(scenario, seed=seed)
    outcome = simulate(item, SpecConfig(), 120, fresh(scenario, state_dict))
    fixed = 0
    for start in outcome.counts[:n_steps]:
        fixed += (
            simulate(item, SpecConfig(num_draft_tokens=64), 120, start=start, n_steps=1).counts[-1]
            - start
        )
    return outcome.counts[n_steps], fixed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["streamed, greedy", "streamed, sampled"])
def test_the_first_steps_gain_as_much_as_a_fixed_tree_of_64_nodes(name: str) -> None:
    scenario = SIX[name]
    state_dict = learnt(scenario, 400)
    for known, share in ((state_dict, 0.95), (None, 0.85)):
        actual = np.sum([first_steps(scenario, seed, known) for seed in range(16)], axis=0)
        assert actual[0] >= share * actual[1]
