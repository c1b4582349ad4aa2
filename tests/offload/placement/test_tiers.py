"""Plans over three tiers fit both memories, and leave little to copy and to read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiered import plan_tiers

from offload.budget import BudgetExceeded
from offload.formats.tensors import TensorRecord
from offload.placement.placement import LayerWeights, Placement
from offload.placement.plan import min_host_bytes
from offload.placement.tiers import fill_device, min_device_bytes
from offload.units import GIB, KIB, MIB

_ROLES = {"down": 4, "gate": 4, "up": 4, "norm": 0.001, "q": 2, "o": 2}
SMALL = 512 * KIB


def model(n_layers: int, unit_bytes: int, start: int = 1_000) -> list[LayerWeights]:
    """Layers of some large and one tiny tensor, in one imaginary file."""
    layers = []
    for index in range(n_layers):
        records = []
        for role, size in _ROLES.items():
            n_bytes = int(size * unit_bytes) // 2 * 2
            name = f"model.layers.{index}.{role}"
            records.append(TensorRecord(name, "BF16", (n_bytes // 2,), Path("m"), start, n_bytes))
            start += n_bytes
        layers.append(LayerWeights(tuple(records)))
    return layers


def check(plan: Placement, layers: list[LayerWeights], host: int, device: int) -> None:
    """Check the invariants of every plan."""
    assert plan.device_bytes <= device
    assert plan.host_bytes <= host
    assert [layer.tensors for layer in plan.layers] == [layer.tensors for layer in layers]
    assert plan.moved_bytes >= plan.streamed_bytes
    assert plan.n_moving_layers >= plan.n_streamed_layers
    assert plan.n_device_slots == min(2, plan.n_moving_layers)


@settings(max_examples=60, deadline=None)
@given(
    n_layers=st.integers(1, 9),
    unit=st.integers(1, 40).map(lambda n: n * 61 * KIB),
    more=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    n_slots=st.sampled_from([None, 1, 2, 3]),
)
def test_every_plan_keeps_to_both_memories(n_layers, unit, more, n_slots):
    layers = model(n_layers, unit)
    minimum = min_device_bytes(layers)
    device = minimum + more[0] * MIB
    smallest = min_host_bytes(fill_device(layers, device), n_slots, is_on_device=True)
    host = smallest + more[1] * MIB
    plan = plan_tiers(layers, host, device, n_slots=n_slots)
    check(plan, layers, host, device)
    with pytest.raises(BudgetExceeded, match="VRAM budget"):
        plan_tiers(layers, host, minimum - 1, n_slots=n_slots)
    if smallest:
        with pytest.raises(BudgetExceeded, match="memory budget"):
            plan_tiers(layers, smallest - 1, device, n_slots=n_slots)


def test_a_model_that_fits_on_the_device_takes_no_host_memory():
    layers = model(8, MIB)
    plan = plan_tiers(layers, 0, GIB)
    assert plan.n_moving_layers == plan.n_slots == plan.host_bytes == plan.moved_bytes == 0
    assert plan.n_device_slots == 0


def test_with_host_memory_enough_nothing_is_read_from_storage():
    layers = model(40, 4 * MIB)  # 2.5 GiB
    plan = plan_tiers(layers, 3 * GIB, GIB // 2)
    assert plan.streamed_bytes == plan.n_slots == 0
    total = sum(r.n_bytes for layer in layers for r in layer.tensors)
    assert plan.moved_bytes == pytest.approx(total - plan.device_layout.n_bytes, rel=0.01)


def test_both_memories_are_used_up():
    """Half a GiB of 2.5 GiB is on the device and 1 GiB pinned: the rest is read, in each pass."""
    layers = model(40, 4 * MIB)
    plan = plan_tiers(layers, GIB, GIB // 2)
    check(plan, layers, GIB, GIB // 2)
    largest = 16 * MIB
    assert plan.device_bytes > GIB // 2 - largest
    assert plan.host_bytes > GIB - largest
    slots = plan.device_ring_bytes + plan.ring_bytes
    total = sum(r.n_bytes for layer in layers for r in layer.tensors)
    assert plan.streamed_bytes == pytest.approx(total - 3 * GIB // 2 + slots, rel=0.03)


def test_more_of_either_memory_never_moves_more():
    layers = model(24, 2 * MIB)
    minimum = min_device_bytes(layers)
    copied, streamed = [], []
    for more in range(0, 900, 100):
        plan = plan_tiers(layers, 256 * MIB, minimum + more * MIB)
        copied.append(plan.moved_bytes)
        streamed.append(plan_tiers(layers, (256 + more) * MIB, minimum).streamed_bytes)
    assert copied == sorted(copied, reverse=True)
    assert streamed == sorted(streamed, reverse=True)
    assert copied[-1] == 0
