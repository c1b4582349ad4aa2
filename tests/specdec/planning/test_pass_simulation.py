"""Seconds of a pass, by bytes, bandwidth and arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_models import PaperModel
from tiered import plan_tiers

from backends.contract.curve import ComputeCurve
from backends.contract.source import ModelCompute
from offload.placement.plan import plan_placement
from offload.units import GIB, MIB
from specdec.planning.pass_simulation import PassSimulation

LAYERS = PaperModel("t", 12, 4 * MIB).layers
LAYER_BYTES = 12 * 8 * MIB
HEAD_BYTES = 10 * MIB


def model(
    available_bytes: int, curve: ComputeCurve, storage: float = 1e9, n_slots: int = 3
) -> PassSimulation:
    plan = plan_placement(LAYERS, available_bytes, n_slots=n_slots)
    return PassSimulation(plan, ModelCompute(curve, HEAD_BYTES), storage)


def linear(fixed_seconds: float, seconds_per_row: float) -> ComputeCurve:
    """Linear cost of the whole model."""
    n_bytes = LAYER_BYTES + HEAD_BYTES
    return ComputeCurve.linear(fixed_seconds / n_bytes, seconds_per_row / n_bytes)


def test_a_streamed_pass_takes_as_long_as_its_reads():
    item = model(40 * MIB, linear(0.001, 0.0001))
    streamed = item.placement.streamed_bytes
    assert streamed > 0
    assert item.seconds(1) == pytest.approx(streamed / 1e9)
    assert item.times(1).stall_seconds == pytest.approx(streamed / 1e9 - 0.0011)


def test_many_tokens_take_as_long_as_their_arithmetic():
    item = model(40 * MIB, linear(0.1, 0.1))
    assert item.seconds(100) == pytest.approx(10.1)
    assert item.times(100).stall_seconds == pytest.approx(0.0, abs=1e-9)


def test_reads_that_slow_the_arithmetic_count_while_they_run():
    n_bytes = LAYER_BYTES + HEAD_BYTES
    slowed = ComputeCurve((1,), (1 / n_bytes,), (2 / n_bytes,))
    item = model(40 * MIB, slowed)
    read_seconds = item.placement.streamed_bytes / 1e9
    # Reading takes half of its time from the second of arithmetic.
    assert item.seconds(1) == pytest.approx(1 + read_seconds / 2, rel=1e-3)


@settings(max_examples=60, deadline=None)
@given(
    available=st.integers(28, 110),
    fixed=st.floats(1e-4, 1.0),
    per_row=st.floats(1e-5, 0.1),
    num_tokens=st.integers(1, 128),
)
def test_the_cost_for_the_policy_is_near_the_simulation(available, fixed, per_row, num_tokens):
    item = model(available * MIB, linear(fixed, per_row))
    cost = item.cost_model()
    assert cost.seconds(num_tokens) == pytest.approx(item.seconds(num_tokens), rel=0.1)


@pytest.mark.parametrize("max_seconds", [0.12, 0.25, 1.0])
def test_costs_of_the_largest_passes_do_not_count_for_smaller_ones(max_seconds: float):
    """Reads hide 64 rows; the arithmetic of 128 takes `max_seconds`."""
    n_bytes = LAYER_BYTES + HEAD_BYTES
    measurements = tuple(seconds / n_bytes for seconds in (0.01, 0.02, 0.05, max_seconds))
    item = model(40 * MIB, ComputeCurve((1, 16, 64, 128), measurements, measurements))
    assert item.seconds(64) == pytest.approx(item.seconds(1))
    cost = item.cost_model()
    for num_tokens in (1, 32, 64, 128):
        assert cost.seconds(num_tokens) == pytest.approx(item.seconds(num_tokens), rel=0.01)
    assert cost.num_free_tokens >= 64


def test_moving_what_has_arrived_is_work_too():
    plan = plan_placement(LAYERS, 40 * MIB, n_slots=3)
    item = PassSimulation(plan, ModelCompute(linear(0.1, 0.1), HEAD_BYTES, 1e-9), 1e9)
    assert item.seconds(100) == pytest.approx(10.1 + plan.streamed_bytes * 1e-9)


def test_what_comes_after_the_layers_is_the_same_on_a_gpu():
    compute = ModelCompute(
        linear(0.1, 0.1),
        HEAD_BYTES,
        head_per_byte=ComputeCurve.linear(2 / HEAD_BYTES, 1 / HEAD_BYTES),
        per_pass=ComputeCurve.linear(5.0, 0.5),
    )
    on_gpu = PassSimulation(plan_tiers(LAYERS, GIB, GIB), compute, 1e9, 1e10)
    assert on_gpu.placement.n_moving_layers == 0
    layers = LAYER_BYTES / (LAYER_BYTES + HEAD_BYTES) * 0.4
    assert on_gpu.seconds(3) == pytest.approx(layers + (2 + 3) + (5 + 1.5))
    on_cpu = PassSimulation(plan_placement(LAYERS, GIB), compute, 1e9)
    assert on_cpu.seconds(3) == pytest.approx(on_gpu.seconds(3))
