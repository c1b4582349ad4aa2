"""A further sequence runs while it adds no more to a pass than a running one's share of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.policy.cost_model import CostModel
from specdec.policy.kv_price import KvPrice

STREAMED_BYTES = 4_000_000_000
BANDWIDTH = 2e9
FREE = CostModel(STREAMED_BYTES / BANDWIDTH, 0.0, 1e-9)
"""Passes of two seconds, whose arithmetic costs nothing."""


@pytest.mark.parametrize(("num_tokens", "max_running"), [(100, 40), (500, 8), (1000, 4), (5000, 0)])
def test_kv_of_all_takes_no_more_than_the_layers_that_stream(
    num_tokens: int, max_running: int
) -> None:
    price = KvPrice(1_000_000, BANDWIDTH)
    assert price.pass_seconds(num_tokens) == num_tokens * 1_000_000 / BANDWIDTH
    for num_running in range(60):
        pays = price.pays(FREE, num_running, num_tokens)
        assert pays == (num_running <= max_running or num_running == 0)


@given(
    cost=st.builds(CostModel, st.floats(0, 9), st.floats(0, 9), st.floats(1e-6, 9)),
    bytes_per_token=st.integers(1, 10**7),
    bandwidth=st.floats(1e6, 1e10),
    num_running=st.integers(1, 40),
    num_tokens=st.integers(1, 5000),
)
def test_it_pays_where_tokens_per_second_grow(
    cost: CostModel, bytes_per_token: int, bandwidth: float, num_running: int, num_tokens: int
) -> None:
    price = KvPrice(bytes_per_token, bandwidth)
    seconds = cost.seconds(num_running)
    more = cost.seconds(num_running + 1) - seconds + price.pass_seconds(num_tokens)
    before, after = num_running / seconds, (num_running + 1) / (seconds + more)
    if abs(after - before) > 1e-9 * before:
        assert price.pays(cost, num_running, num_tokens) == (after > before)


def test_it_always_pays_where_nothing_runs_or_no_layer_streams() -> None:
    dear = CostModel(0.0, 0.0, 1.0)
    assert KvPrice(10**12, 1.0).pays(dear, 0, 10**6)
    assert KvPrice().pays(dear, 5, 10**6)
