"""Copy bandwidth, by the clock of a device that copies one byte per second."""

from __future__ import annotations

import pytest
from fake_device import DeviceBroken, FakeDevice, Policy

from offload.budget import BudgetExceeded
from offload.device.bandwidth import measure_copies
from offload.units import MIB


@pytest.mark.parametrize("policy", Policy)
def test_the_device_s_own_clock_counts(policy: Policy) -> None:
    device = FakeDevice(policy)
    assert measure_copies(device, MIB) == pytest.approx(1.0)
    assert (device.n_allocated, device.n_pinned) == (0, 0)
    assert device.n_copies > 10


def test_what_was_taken_is_given_back_where_it_fails() -> None:
    device = FakeDevice(capacity_bytes=MIB)
    with pytest.raises(BudgetExceeded):
        measure_copies(device, MIB)
    assert (device.n_allocated, device.n_pinned) == (0, 0)
    broken = FakeDevice(break_at=3)
    with pytest.raises(DeviceBroken):
        measure_copies(broken, MIB)
    assert (broken.n_allocated, broken.n_pinned) == (0, 0)
