"""Exponentially decaying means of measurements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.policy.moving_average import LASTING, RECENT, MovingAverage


def test_what_is_expected_counts_until_enough_is_measured() -> None:
    mean = MovingAverage(LASTING, (9.0,))
    assert mean.means == (9.0,)
    for i in range(60):
        mean.add(0.1, n=1 + i % 8)
    assert mean.means[0] == pytest.approx(0.1, rel=0.15)


def test_several_measurements_at_once_count_as_if_they_came_one_by_one() -> None:
    at_once, singly = MovingAverage(RECENT, (1.0,)), MovingAverage(RECENT, (1.0,))
    at_once.add(5.0, n=4)
    for _ in range(4):
        singly.add(5.0)
    assert at_once.means[0] == pytest.approx(5.0, rel=0.2)
    assert singly.means[0] == pytest.approx(at_once.means[0], rel=0.05)


@given(st.lists(st.tuples(st.integers(1, 32), st.floats(0.0, 9.0))))
def test_a_mean_is_among_what_was_measured(measured: list[tuple[int, float]]) -> None:
    mean = MovingAverage(LASTING, (1.0,))
    for n, value in measured:
        mean.add(value, n=n)
        assert -1e-9 <= mean.means[0] <= 9.0 + 1e-9


def test_what_another_process_saw_counts_as_little_as_what_was_expected() -> None:
    known = MovingAverage(LASTING, (1.0, 2.0), 4.0)
    for _ in range(100):
        known.add(3.0, 6.0)
    again = MovingAverage(LASTING, (1.0, 2.0), 4.0)
    again.load_state_dict(known.state_dict())
    assert again.means == pytest.approx(known.means)
    assert again.state_dict()[0] == pytest.approx(4.0)


@pytest.mark.parametrize(
    "state_dict", [None, [1.0], [0.0, 1.0], [-1.0, 1.0], [1.0, float("nan")], "x"]
)
def test_a_broken_one_is_refused(state_dict: object) -> None:
    with pytest.raises(ValueError):
        MovingAverage(LASTING, (1.0,)).load_state_dict(state_dict)
