"""What a pair's rounds have taught goes to the next process, and a broken file does not."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.worlds.settings import SIX
from bench.worlds.world import MAX_NODES, World, simulate
from specdec.config import SpecConfig
from specdec.policy.cost_model import CostModel
from specdec.policy.experience import Experience, experience_of

COST, DRAFT = CostModel(1.0, 0.2, 0.05), CostModel(0.02, 0.0, 1e-6)
WORLD = SIX["streamed, greedy"]


def fresh(world: World, kept: Any = None) -> Experience:
    return experience_of(world.planned(), world.planned_draft(), MAX_NODES, kept)


def learnt(world: World, n_tokens: int = 200) -> Any:
    """What the file has after a text."""
    experience = fresh(world)
    simulate(replace(world, seed=77), SpecConfig(), n_tokens, experience)
    return json.loads(json.dumps(experience.kept()))


def test_times_are_known_in_the_next_process_though_its_plan_is_another_one() -> None:
    experience = Experience(COST, DRAFT, 32)
    for _ in range(5):
        experience.cost.observe(17, 3.0)
        experience.note_drafting(4, 0.4)
    kept = json.loads(json.dumps(experience.kept()))
    other = experience_of(CostModel(2.0, 0.4, 0.1), DRAFT, 32, kept)
    assert other.cost.seconds(17) == pytest.approx(3.0, rel=0.02)
    assert other.run_seconds == pytest.approx(experience.run_seconds)


def test_what_is_kept_counts_little_against_what_is_measured() -> None:
    experience = Experience(COST, DRAFT, 32)
    for _ in range(50):
        experience.cost.observe(17, 1.0)
    again = experience_of(COST, DRAFT, 32, experience.kept())
    for _ in range(8):
        again.cost.observe(17, 3.0)
    assert again.cost.seconds(17) > 2.3


def test_a_text_that_is_known_changes_nothing_by_being_kept_twice() -> None:
    kept = learnt(WORLD)
    assert fresh(WORLD, kept).kept()["lessons"].keys() == kept["lessons"].keys()


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)


@given(st.data())
def test_a_broken_file_is_ignored(data: st.DataObject) -> None:
    """Any part of it replaced by anything."""
    kept = learnt_once()
    place: Any = kept
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(JSON)
    outcome = simulate(WORLD, SpecConfig(), 20, fresh(WORLD, kept))
    assert outcome.counts[-1] >= 20


def learnt_once(_cache: list[str] = []) -> Any:  # noqa: B006 (kept on purpose)
    if not _cache:
        _cache.append(json.dumps(learnt(WORLD)))
    return json.loads(_cache[0])


@pytest.mark.parametrize(
    "kept", [None, 7, [], {}, {"version": 3}, {"version": 4}, "x", float("nan")]
)
def test_anything_else_is_no_experience(kept: Any) -> None:
    assert fresh(WORLD, kept).kept() == fresh(WORLD).kept()


def test_another_version_is_not_used() -> None:
    """Such as the one before, which had measured drafting ahead."""
    kept = {**learnt_once(), "version": 3, "ahead": [[1.0, 0.1]] * 3}
    assert fresh(WORLD, kept).kept() == fresh(WORLD).kept()


@pytest.mark.parametrize("chain", [[8.0, 9.0], [8.0, -1.0], [0.0, 0.0]])
def test_a_broken_share_of_chains_is_learnt_anew(chain: list[float]) -> None:
    kept = learnt_once()
    for lessons in kept["lessons"].values():
        lessons["chain"] = chain
    experience = fresh(WORLD, kept)
    simulate(WORLD, SpecConfig(), 20, experience)
    (lessons,) = experience.kept()["lessons"].values()
    assert lessons["chain"] == pytest.approx([8.0, 8.0 * 0.85])


def test_it_is_bounded() -> None:
    experience = Experience(COST, DRAFT, 1024)
    simulate(WORLD, SpecConfig(), 100, experience)
    (lessons,) = experience.kept()["lessons"].values()
    many = {**experience.kept(), "lessons": {str(i): lessons for i in range(1000)}}
    assert len(json.dumps(experience_of(COST, DRAFT, 1024, many).kept())) < 100_000


def first_rounds(world: World, seed: int, kept: Any, n_rounds: int = 4) -> tuple[int, int]:
    """(tokens of the first rounds, tokens of fixed trees of 64 nodes in the same places)."""
    one = replace(world, seed=seed)
    outcome = simulate(one, SpecConfig(), 120, fresh(world, kept))
    fixed = 0
    for start in outcome.counts[:n_rounds]:
        fixed += (
            simulate(one, SpecConfig(num_draft_tokens=64), 120, start=start, n_rounds=1).counts[-1]
            - start
        )
    return outcome.counts[n_rounds], fixed


@pytest.mark.parametrize("name", ["streamed, greedy", "streamed, sampled"])
def test_the_first_rounds_bring_what_a_fixed_tree_of_64_nodes_brings(name: str) -> None:
    world = SIX[name]
    kept = learnt(world, 400)
    for known, share in ((kept, 0.95), (None, 0.85)):
        found = np.sum([first_rounds(world, seed, known) for seed in range(16)], axis=0)
        assert found[0] >= share * found[1]
