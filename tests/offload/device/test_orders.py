"""Mutation tests of the device streamer: an engine without one ordering must be detected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fake_device import FakeDevice, FakeEvent, Policy
from tiered import DEVICE, HOST, POLICIES, STORAGE, run_passes, streaming, tiered
from weight_files import write_weights

from offload.device.streamer import DeviceStreamer
from offload.ring.slots import Slot, SlotRing
from offload.storage.aligned import ALIGNMENT

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


class NoComputeWait(FakeDevice):
    """Computations begin before the layer has arrived."""

    def compute_waits(self, event: FakeEvent) -> None:
        pass


class NoCopyWait(FakeDevice):
    """A device slot is overwritten while computations use it."""

    def copy_waits(self, event: FakeEvent) -> None:
        pass


class DeafEvent(FakeEvent):
    def wait(self) -> None:
        pass


class NoHostWait(FakeDevice):
    """A pinned slot is refilled while it is copied from, and loading does not wait."""

    def record_copy(self) -> FakeEvent:
        event = super().record_copy()
        event.__class__ = DeafEvent
        return event


class EarlyFence(FakeDevice):
    """The fence of a device slot is that of the previous layer's computations."""

    last: FakeEvent | None = None

    def record_compute(self) -> FakeEvent:
        self.last, event = super().record_compute(), self.last
        return event or self.last


def has_seen_wrong_bytes(act: Callable[[], None]) -> bool:
    try:
        act()
    except RuntimeError as error:
        return "stale or wrong bytes" in str(error.__cause__)
    return False


@pytest.mark.parametrize(
    ("mutant", "tier"),
    [
        (NoComputeWait, HOST),
        (NoComputeWait, STORAGE),
        (NoCopyWait, HOST),
        (NoCopyWait, STORAGE),
        (EarlyFence, HOST),
        (EarlyFence, STORAGE),
        (NoHostWait, STORAGE),  # permanently pinned memory is never overwritten
        (NoHostWait, DEVICE),  # during loading
    ],
)
def test_a_missing_order_is_seen(tmp_path: Path, mutant: type[FakeDevice], tier: str) -> None:
    weights = write_weights(tmp_path, [[9000], [5000], [12_000], [300], [8000]])
    n_seen = 0
    for copies, computations in POLICIES:
        device = mutant(copies, computations)
        plan = tiered(weights, lambda i, j: tier)
        streamer = DeviceStreamer(plan, device, read_bytes=ALIGNMENT)
        n_seen += has_seen_wrong_bytes(lambda: run_passes(streamer, device, weights, 4))  # noqa: B023
        streamer.close()
    assert n_seen


def test_a_fence_left_out_of_a_restart_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass ends in mid-layer, with its computation pending, and the slot is reclaimed."""
    weights = write_weights(tmp_path, [[9000], [5000], [12_000]])

    def leave_and_go_on(device: FakeDevice) -> None:
        with streaming(tiered(weights, lambda i, j: HOST), device) as streamer:
            pinned = streamer.layer(0)
            tensors = pinned.__enter__()
            device.compute(lambda: weights.check(0, tensors))
            streamer.restart()
            run_passes(streamer, device, weights, 2)

    leave_and_go_on(FakeDevice(Policy.EARLY, Policy.LATE))
    free = SlotRing._free

    def free_without_fence(ring: SlotRing, slot: Slot) -> None:
        fence = slot.fence
        free(ring, slot)
        slot.fence = fence

    monkeypatch.setattr(SlotRing, "_free", free_without_fence)
    assert has_seen_wrong_bytes(lambda: leave_and_go_on(FakeDevice(Policy.EARLY, Policy.LATE)))
