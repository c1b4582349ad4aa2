"""Seconds of passes from noisy, changing measurements."""

from __future__ import annotations

import pytest

from specdec.policy.costs import PassCost, PassTimes

COST = PassCost(read_seconds=1.0, row_free_seconds=0.2, seconds_per_row=0.05)


def test_the_plan_holds_until_something_is_measured() -> None:
    times = PassTimes(COST.seconds, 40)
    assert times.seconds(40) == pytest.approx([COST.seconds(n) for n in range(1, 41)])


def test_measured_sizes_are_what_was_measured_and_the_plan_is_the_shape_between() -> None:
    times = PassTimes(COST.seconds, 40)
    for _ in range(5):
        for n in (1, 32):
            times.observe(n, 2.0 * COST.seconds(n))
    assert times.seconds(40) == pytest.approx([2.0 * COST.seconds(n) for n in range(1, 41)])


def test_a_size_of_its_own_is_not_drowned_by_many_passes_of_another() -> None:
    times = PassTimes(COST.seconds, 40)
    times.observe(1, 0.3)
    for _ in range(60):
        times.observe(4, 5.0)
    assert times.of(1) == pytest.approx(0.3, rel=0.05)
    assert times.of(4) == pytest.approx(5.0, rel=0.05)


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
