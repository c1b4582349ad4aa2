"""Curves of seconds over tokens."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backends.contract.curve import ComputeCurve


def curve(*seconds: float, beside: tuple[float, ...] | None = None) -> ComputeCurve:
    sizes = (1, 4, 16, 64)[: len(seconds)]
    return ComputeCurve(sizes, seconds, beside or seconds)


def test_straight_lines_between_what_was_timed_and_on():
    item = curve(1.0, 2.5, 2.5, 12.1)
    assert [item.seconds(n) for n in (1, 2, 4, 10, 16)] == [1.0, 1.5, 2.5, 2.5, 2.5]
    assert item.seconds(40) == pytest.approx(7.3)
    assert item.seconds(128) == pytest.approx(12.1 + 64 * 0.2)
    assert item.seconds_per_token == pytest.approx(0.2)


def test_of_timings_that_do_not_rise_a_token_takes_its_share_of_all():
    assert curve(2.0, 1.0, 1.0).seconds_per_token == pytest.approx(1.0 / 16)


def test_more_tokens_never_take_less():
    item = curve(2.0, 1.0, 3.0)  # the first measurement was disturbed
    assert [item.seconds(n) for n in (1, 2, 4)] == [1.0, 1.0, 1.0]


@given(
    st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=4), st.integers(1, 300), st.integers(1, 9)
)
@example([1.9, 249.0, 248.5], 4, 1)  # the line to the second point ends above it, rounded
def test_curves_rise_and_scale(seconds, num_tokens, more):
    item = curve(*seconds)
    assert item.seconds(num_tokens + more) >= item.seconds(num_tokens)
    assert item.times(3.0).seconds(num_tokens) == pytest.approx(3 * item.seconds(num_tokens))


def test_reads_slow_it_but_never_make_it_faster():
    item = curve(1.0, 2.0, beside=(1.5, 1.9))
    assert item.beside_factor(1) == 1.5
    assert item.beside_factor(4) == 1.0
    assert ComputeCurve.linear(2.0, 0.5).seconds(100) == pytest.approx(52.0)
    assert ComputeCurve.linear(2.0, 0.5).beside_factor(9) == 1.0


@pytest.mark.parametrize("sizes", [(), (2, 4), (1, 1), (4, 1)])
def test_sizes_ascend_from_one(sizes):
    seconds = tuple(1.0 for _ in sizes)
    with pytest.raises(ValueError, match="num_tokens"):
        ComputeCurve(sizes, seconds, seconds)


def test_mixtures_are_sums_at_every_number_of_tokens():
    first, second = curve(1.0, 4.0), ComputeCurve((1, 2, 8), (5.0, 6.0, 9.0), (6.0, 6.0, 9.0))
    mixed = ComputeCurve.mixed([(2.0, first), (0.5, second)])
    for num_tokens in (1, 2, 3, 4, 6, 8, 20):
        expected = 2 * first.seconds(num_tokens) + 0.5 * second.seconds(num_tokens)
        assert mixed.seconds(num_tokens) == pytest.approx(expected)
    assert mixed.beside_factor(1) == pytest.approx((2 + 3.0) / (2 + 2.5))


def test_what_a_byte_read_costs_stays_where_fewer_are_read():
    item = curve(1.0, 2.0, beside=(2.0, 2.0))
    assert item.is_slowed_by_reads
    half = item.beside_fewer_reads(0.5)
    assert [half.beside_factor(n) for n in (1, 4)] == [1.5, 1.0]
    assert half.alone == item.alone
    assert not item.beside_fewer_reads(0.0).is_slowed_by_reads
