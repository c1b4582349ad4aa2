"""Seconds of passes and drafts from noisy, changing measurements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.policy.costs import DraftTimes, PassCost, PassTimes

COST = PassCost(read_seconds=1.0, row_free_seconds=0.2, seconds_per_row=0.05)


def test_the_plan_holds_until_something_is_measured() -> None:
    times = PassTimes(COST.seconds, 40)
    assert times.seconds(40) == pytest.approx([COST.seconds(n) for n in range(1, 41)])
    assert not any(times.is_known(n) for n in range(1, 41))


def test_measured_sizes_are_what_was_measured_and_the_plan_is_the_shape_between() -> None:
    times = PassTimes(COST.seconds, 40)
    for _ in range(5):
        for n in (1, 32):
            times.observe(n, 2.0 * COST.seconds(n))
    assert times.seconds(40) == pytest.approx([2.0 * COST.seconds(n) for n in range(1, 41)])
    assert times.is_known(1)
    assert times.is_known(32)
    assert not times.is_known(6)


def test_a_size_of_its_own_is_not_drowned_by_many_passes_of_another() -> None:
    times = PassTimes(COST.seconds, 40)
    times.observe(1, 0.3)
    for _ in range(60):
        times.observe(4, 5.0)
    assert times.of(1) == pytest.approx(0.3, rel=0.05)
    assert times.of(4) == pytest.approx(5.0, rel=0.05)


def test_single_stumbles_count_little() -> None:
    times = PassTimes(COST.seconds, 40)
    rng = np.random.default_rng(1)
    for i in range(40):
        times.observe(8, 30.0 if i % 10 == 3 else 1.5 * (1.0 + 0.05 * rng.random()))
    assert times.of(8) == pytest.approx(1.5, rel=0.12)


def test_a_change_of_speed_is_followed_within_some_passes() -> None:
    times = PassTimes(COST.seconds, 40)
    for _ in range(100):
        times.observe(8, 1.0)
    for _ in range(24):
        times.observe(8, 4.0)
    assert times.of(8) == pytest.approx(4.0, rel=0.15)


def test_a_size_that_is_long_out_of_use_follows_the_others() -> None:
    times = PassTimes(COST.seconds, 40)
    times.observe(1, 1.0)
    for _ in range(2000):
        times.observe(8, 4.0)
    assert times.of(1) == pytest.approx(4.0, rel=1e-3)  # both are bound by the same reads


def test_a_run_of_the_draft_takes_what_recent_ones_took() -> None:
    times = DraftTimes(prior_run_seconds=9.0)
    assert times.run_seconds == 9.0
    for i in range(60):
        n_runs = 1 + i % 8
        times.observe(n_runs, 5.0 if i % 10 == 3 else 0.1 * n_runs)
    assert times.run_seconds == pytest.approx(0.1, rel=0.15)


@given(st.lists(st.tuples(st.integers(0, 32), st.floats(0.0, 9.0))))
def test_no_run_takes_less_than_nothing(drafts: list[tuple[int, float]]) -> None:
    times = DraftTimes(prior_run_seconds=1.0)
    for n_runs, seconds in drafts:
        times.observe(n_runs, seconds)
        assert 0.0 <= times.run_seconds <= 9.0
