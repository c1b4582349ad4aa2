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
    assert times.seconds() == pytest.approx([COST.seconds(n) for n in range(1, 41)])
    assert not times.evidence().any()


def test_measured_sizes_are_what_was_measured_and_the_plan_is_the_shape_between() -> None:
    times = PassTimes(COST.seconds, 40)
    for _ in range(5):
        for n in (1, 32):
            times.observe(n, 2.0 * COST.seconds(n))
    assert times.seconds() == pytest.approx([2.0 * COST.seconds(n) for n in range(1, 41)])
    evidence = times.evidence()
    assert min(evidence[0], evidence[31]) > 4.0
    assert evidence[5] < 0.1


def test_a_size_of_its_own_is_not_drowned_by_many_passes_of_another() -> None:
    times = PassTimes(COST.seconds, 40)
    times.observe(1, 0.3)
    for _ in range(60):
        times.observe(4, 5.0)
    assert times.of(1) == pytest.approx(0.3)
    assert times.of(4) == pytest.approx(5.0)


def test_single_stumbles_do_not_count() -> None:
    times = PassTimes(COST.seconds, 40)
    rng = np.random.default_rng(1)
    for i in range(40):
        times.observe(8, 30.0 if i % 4 == 0 else 1.5 * (1.0 + 0.05 * rng.random()))
    assert times.of(8) == pytest.approx(1.5, rel=0.06)


def test_what_a_second_row_takes_is_bounded_by_larger_passes() -> None:
    """The one pass of two rows was disturbed; passes of nine take no longer than those of one."""
    times = PassTimes(COST.seconds, 40)
    for _ in range(6):
        times.observe(1, 1.0)
        times.observe(9, 1.05)
    times.observe(2, 1.9)
    assert times.of(2) > 1.5
    beyond = times.beyond_one()
    assert beyond[:2] == pytest.approx([0.0, 0.05])
    assert (np.diff(beyond) >= 0.0).all()


def test_a_change_of_speed_is_followed_within_the_passes_that_are_kept() -> None:
    times = PassTimes(COST.seconds, 40)
    for _ in range(100):
        times.observe(8, 1.0)
    for _ in range(8):
        times.observe(8, 4.0)
    assert times.of(8) == pytest.approx(4.0)


def test_a_size_that_is_long_out_of_use_follows_the_others() -> None:
    times = PassTimes(COST.seconds, 40)
    times.observe(1, 1.0)
    for _ in range(2000):
        times.observe(8, 4.0)
    assert times.of(1) == pytest.approx(4.0)  # both are bound by the same reads


def test_what_is_fixed_in_drafting_is_told_from_what_each_run_takes() -> None:
    times = DraftTimes(prior_run_seconds=9.0)
    assert times.seconds(3, 3) == pytest.approx(27.0)
    rng = np.random.default_rng(2)
    for i in range(24):
        n = int(rng.integers(1, 9))
        times.observe(n, n, 5.0 if i % 6 == 0 else 0.3 + 0.1 * n)
    assert times.run_seconds == pytest.approx(0.1, rel=0.1)
    assert times.seconds(1, 1) == pytest.approx(0.4, rel=0.1)
    assert times.seconds(0, 0) == 0.0


def test_wide_runs_are_told_from_narrow_ones() -> None:
    times = DraftTimes(prior_run_seconds=9.0)
    rng = np.random.default_rng(3)
    for i in range(24):
        widths = rng.integers(1, 33, size=int(rng.integers(1, 9)))
        seconds = 0.3 + 0.1 * len(widths) + 0.02 * widths.sum()
        times.observe(len(widths), int(widths.sum()), 9.0 if i % 6 == 0 else seconds)
    assert times.seconds(4, 4) == pytest.approx(0.78, rel=0.1)
    assert times.seconds(4, 100) == pytest.approx(2.7, rel=0.1)
    width = 16  # nodes of a run, on the average
    assert times.run_seconds == pytest.approx(0.1 + 0.02 * width, rel=0.15)


@given(
    st.lists(st.tuples(st.integers(1, 32), st.integers(1, 32), st.floats(1e-4, 9.0)), min_size=1)
)
def test_no_draft_takes_less_for_more_runs_or_nodes(
    drafts: list[tuple[int, int, float]],
) -> None:
    times = DraftTimes(prior_run_seconds=1.0)
    for n_runs, width, seconds in drafts:
        times.observe(n_runs, n_runs * width, seconds)
    assert times.run_seconds >= 0.0
    assert 0.0 <= times.seconds(1, 1) <= times.seconds(2, 2) <= times.seconds(2, 40) < 1e4


def test_drafts_of_one_size_give_their_mean_for_each_run() -> None:
    times = DraftTimes(prior_run_seconds=9.0)
    times.observe(4, 4, 0.8)
    assert times.run_seconds == pytest.approx(0.2)
    assert times.seconds(8, 8) == pytest.approx(1.6)
