"""Seconds of passes as planned, and from noisy, changing measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.policy.cost_model import MAX_MEASURED_TOKENS, CostModel, run_tokens

READ, FIXED, PER_TOKEN = 1.0, 0.2, 0.05
LEARNT_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)

costs = st.builds(CostModel, st.floats(0.0, 10.0), st.floats(0.0, 3.0), st.floats(1e-3, 1.0))
measured = st.lists(
    st.tuples(st.integers(1, MAX_MEASURED_TOKENS), st.floats(0.05, 20.0)), max_size=6
)


@pytest.fixture
def cost() -> CostModel:
    return CostModel(READ, FIXED, PER_TOKEN)


def stall_seconds_of(num_tokens: int, factor: float = 1.0) -> float:
    """Return the wait for weights in a pass that takes `factor` times as long as planned."""
    return factor * max(0.0, READ - FIXED - PER_TOKEN * num_tokens)


# --- plan -----------------------------------------------------------------------------------------


def test_a_run_of_a_chain_computes_one_token():
    assert run_tokens(64, width=1, block_size=None) == 1
    assert run_tokens(64, width=8, block_size=None) > 8
    assert run_tokens(64, width=1, block_size=16) == 16


@given(costs, st.integers(1, 100_000))
def test_the_plan_holds_until_something_is_measured(cost: CostModel, num_tokens: int) -> None:
    assert cost.seconds(num_tokens) == cost.planned_seconds(num_tokens)


def test_tokens_are_free_while_reading_takes_longer() -> None:
    cost = CostModel(read_seconds=2.0, fixed_seconds=0.5, seconds_per_token=0.05)
    assert cost.num_free_tokens == 30
    assert cost.seconds(30) == pytest.approx(2.0)
    assert cost.seconds(40) == pytest.approx(2.5)


def test_in_memory_few_tokens_are_free() -> None:
    cost = CostModel(read_seconds=0.0, fixed_seconds=1.0, seconds_per_token=0.1)
    assert cost.num_free_tokens == 6  # half as long again as one token's pass


# --- measurements ---------------------------------------------------------------------------------


def test_measured_sizes_are_what_was_measured_and_the_plan_is_the_shape_between(
    cost: CostModel,
) -> None:
    planned = [cost.seconds(n) for n in range(1, 41)]
    for _ in range(5):
        for n in (1, 32):
            cost.observe(n, 2.0 * cost.planned_seconds(n), stall_seconds_of(n, 2.0))
    assert [cost.seconds(n) for n in range(1, 41)] == pytest.approx(
        [2.0 * item for item in planned]
    )


def test_passes_that_do_not_wait_show_what_smaller_ones_take(cost: CostModel) -> None:
    """A policy that took them for passes with slow reads would never try smaller ones."""
    knee = int((READ - FIXED) / PER_TOKEN)
    for _ in range(50):
        cost.observe(knee, 1.5 * READ)
    assert cost.seconds(knee) == pytest.approx(1.5 * READ)
    assert cost.seconds(knee // 2) == pytest.approx(READ)
    assert cost.seconds(1) == pytest.approx(READ)


def test_what_is_known_of_one_bound_outlasts_passes_of_the_other(cost: CostModel) -> None:
    for n in (4, 128):
        for _ in range(20):
            cost.observe(n, 4.0 * cost.planned_seconds(n), stall_seconds_of(n, 4.0))
    for _ in range(2000):
        cost.observe(128, 4.0 * cost.planned_seconds(128))
    assert cost.seconds(1) == pytest.approx(4.0 * READ)
    for _ in range(2000):
        cost.observe(4, 4.0 * READ, stall_seconds_of(4, 4.0))
    assert cost.seconds(128) == pytest.approx(4.0 * cost.planned_seconds(128))


def test_passes_that_wait_show_what_others_read(cost: CostModel) -> None:
    for _ in range(50):
        cost.observe(4, 1.5 * READ, stall_seconds=0.5 * READ + stall_seconds_of(4))
    assert cost.seconds(1) == cost.seconds(4) == pytest.approx(1.5 * READ)
    assert cost.seconds(40) == pytest.approx(cost.planned_seconds(40))


def test_passes_that_wait_show_what_larger_ones_compute(cost: CostModel) -> None:
    """A plan with too much arithmetic would keep trees small, and larger passes unmeasured."""
    knee = int((READ - FIXED) / PER_TOKEN)
    assert cost.seconds(2 * knee) > 1.5 * READ
    for _ in range(5):
        cost.observe(knee, READ, stall_seconds=0.5 * READ)
    assert cost.seconds(2 * knee) == pytest.approx(READ, rel=0.05)


@given(costs, measured, st.sampled_from(LEARNT_SIZES), st.floats(0.05, 20.0), st.booleans())
def test_a_pass_that_was_just_measured_takes_as_long_again(
    cost: CostModel,
    passes: list[tuple[int, float]],
    num_tokens: int,
    seconds: float,
    has_waited: bool,
) -> None:
    for size, taken in passes:
        cost.observe(size, taken)
    for _ in range(200):
        cost.observe(num_tokens, seconds, seconds * has_waited)
    assert cost.seconds(num_tokens) == pytest.approx(seconds, rel=0.1)


def test_a_size_of_its_own_is_not_drowned_by_many_passes_of_another(cost: CostModel) -> None:
    cost.observe(1, 0.3)
    for _ in range(60):
        cost.observe(4, 5.0)
    assert cost.seconds(1) == pytest.approx(0.3, rel=0.05)
    assert cost.seconds(4) == pytest.approx(5.0, rel=0.05)


@given(costs, measured, st.integers(0, 100_000))
def test_no_token_costs_less_than_nothing(
    cost: CostModel, passes: list[tuple[int, float]], num_tokens: int
) -> None:
    for size, seconds in passes:
        cost.observe(size, seconds)
    assert cost.extra_seconds(num_tokens) >= 0.0


def test_a_change_of_speed_is_followed_within_some_passes(cost: CostModel) -> None:
    for _ in range(100):
        cost.observe(8, 1.0)
    for _ in range(24):
        cost.observe(8, 4.0)
    assert cost.seconds(8) == pytest.approx(4.0, rel=0.15)


def test_a_size_that_is_long_out_of_use_follows_the_others(cost: CostModel) -> None:
    cost.observe(1, 1.0, stall_seconds=0.5)
    for _ in range(2000):
        cost.observe(8, 4.0, stall_seconds=1.0)
    assert cost.seconds(1) == pytest.approx(4.0, rel=1e-3)  # both are limited by the same reads


def test_passes_larger_than_any_that_is_measured_take_as_much_longer_as_the_largest(
    cost: CostModel,
) -> None:
    cost.observe(MAX_MEASURED_TOKENS, 3.0 * cost.seconds(MAX_MEASURED_TOKENS))
    larger = 10 * MAX_MEASURED_TOKENS  # it corrects the same size
    cost.observe(larger, 3.0 * cost.planned_seconds(larger))
    assert cost.seconds(5000) == pytest.approx(3.0 * cost.planned_seconds(5000))
    assert len(cost.table(5000)) == MAX_MEASURED_TOKENS


@given(costs, measured)
def test_the_table_is_the_seconds_of_every_size(
    cost: CostModel, passes: list[tuple[int, float]]
) -> None:
    for num_tokens, seconds in passes:
        cost.observe(num_tokens, seconds)
    table = cost.table(300)
    assert table.shape == (300,)
    for num_tokens in (1, 2, 7, 64, 100, 300):
        assert table[num_tokens - 1] == pytest.approx(cost.seconds(num_tokens))


@given(costs, measured, st.floats(0.01, 300.0))
def test_the_largest_pass_within_a_time(
    cost: CostModel, passes: list[tuple[int, float]], seconds: float
) -> None:
    for num_tokens, taken in passes:
        cost.observe(num_tokens, taken)
    limit = cost.max_num_tokens(seconds)
    if limit:
        assert cost.seconds(limit) <= seconds * (1 + 1e-6)
    larger = [n for n in range(limit + 1, MAX_MEASURED_TOKENS + 1) if n < limit + 50 or n % 37 == 0]
    assert all(cost.seconds(n) > seconds for n in [*larger, limit + 2, 2 * limit + 2])


def test_of_a_copy_nothing_is_measured(cost: CostModel) -> None:
    """Other models may start with the same plan, which must not change."""
    cost.observe(8, 40.0)
    assert replace(cost).seconds(8) == cost.planned_seconds(8)


@given(costs, measured)
def test_cached_statistics_hold_under_another_plan(
    cost: CostModel, passes: list[tuple[int, float]]
) -> None:
    for num_tokens, seconds in passes:
        cost.observe(num_tokens, seconds)
    same, other = replace(cost), CostModel(0.0, 0.4, 0.1)
    same.load_state_dict(cost.state_dict().tolist())
    other.load_state_dict(cost.state_dict().tolist())
    assert same.state_dict() == pytest.approx(other.state_dict(), abs=1e-6)
    if len(passes) == 1:
        num_tokens = 1 << (passes[0][0].bit_length() - 1)  # one of the learnt sizes
        cost, other = replace(cost), replace(other)
        cost.observe(num_tokens, passes[0][1])
        other.load_state_dict(cost.state_dict().tolist())
        assert other.seconds(num_tokens) == pytest.approx(passes[0][1])


def test_cached_reads_hold_under_another_plan(cost: CostModel) -> None:
    cost.observe(4, 3.0 * READ, 2.0 * READ + stall_seconds_of(4))
    other = CostModel(2.0, FIXED, PER_TOKEN)
    other.load_state_dict(cost.state_dict().tolist())
    assert other.seconds(1) == pytest.approx(3.0 * READ)
    assert other.seconds(100) == pytest.approx(other.planned_seconds(100))


def test_a_mixture_s_tokens_cost_arithmetic_alone_once_all_experts_are_read() -> None:
    cost = CostModel(0.0, 0.2, 0.3, all_experts=(6.0, 0.02))
    assert cost.num_tokens_of_all_experts == 21
    few, many = [1, 5, 20], [21, 64, 512]
    assert [cost.planned_seconds(n) for n in few] == pytest.approx([0.2 + 0.3 * n for n in few])
    assert [cost.planned_seconds(n) for n in many] == pytest.approx([6 + 0.02 * n for n in many])
    for seconds in (3.0, 7.0, 12.0, 100.0):
        num_tokens = cost.max_num_tokens(seconds)
        assert cost.planned_seconds(num_tokens) <= seconds * 1.0001
        assert cost.planned_seconds(num_tokens + 1) > seconds
    assert CostModel(1.0, 0.2, 0.3).num_tokens_of_all_experts == 1
    assert CostModel(0.0, 0.2, 0.01, all_experts=(0.2, 0.01)).num_tokens_of_all_experts == 1


def test_a_slow_machine_makes_no_smaller_passes_of_a_mixture_s_prompts() -> None:
    """Passes below all experts' tokens would read most of them again and again."""
    cost = CostModel(0.0, 0.2, 0.3, all_experts=(6.0, 0.02))
    for n in (1, 21, 64, 512):
        cost.observe(n, 10.0 * cost.planned_seconds(n))
    read_seconds = cost.seconds(cost.num_tokens_of_all_experts)
    assert cost.max_num_tokens(4 * read_seconds) > 512
