from __future__ import annotations

import pytest

from bench.efficiency import (
    efficiency,
    median_pass_seconds,
    pass_times_of,
    typical_pass_seconds,
)
from specdec.decoding.stats import PassTime

TIMES = [PassTime(1, 1.0), PassTime(1, 2.0), PassTime(1, 30.0), PassTime(5, 4.0, True)]


def test_median_of_one_size() -> None:
    assert median_pass_seconds(TIMES, 1) == 2.0
    assert median_pass_seconds(TIMES, 5) == 4.0
    assert median_pass_seconds(TIMES, 2) is None


def test_passes_of_several_sizes_weigh_by_their_number() -> None:
    assert typical_pass_seconds(TIMES) == pytest.approx((3 * 2.0 + 4.0) / 4)
    assert typical_pass_seconds([]) is None


def test_records_of_json_and_of_this_process() -> None:
    records = [{"pass_times": [[1, 1.0, False], [1, 2.0, False]]}, {"pass_times": TIMES[2:]}]
    assert pass_times_of(records) == TIMES


def test_efficiency_is_what_arrives_of_the_promise() -> None:
    """A pass of twice the time brings four tokens: twice the speed at best."""
    assert efficiency(2.0, 4.0, 1.0, 2.0) == pytest.approx(1.0)
    assert efficiency(1.5, 4.0, 1.0, 2.0) == pytest.approx(0.75)
    assert efficiency(1.5, 4.0, None, 2.0) is None
    assert efficiency(1.5, 4.0, 1.0, None) is None
