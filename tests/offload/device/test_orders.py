"""The tests of the device streamer can fail: an engine that leaves out an ordering is found out."""

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
    """A device slot is overwritten while it is computed with."""

    def copy_waits(self, event: FakeEvent) -> None:
        pass


class DeafEvent(FakeEvent):
    def wait(self) -> None:
        pass


class NoHostWait(FakeDevice):
    """A pinned slot is read into while it is copied from; and loading does not wait."""

    def record_copy(self) -> FakeEvent:
        event = super().record_copy()
        event.__class__ = DeafEvent
        return event


class PrefetchFence(FakeDevice):
    """The fence of a device slot is that of the computations of the layer before."""

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
        (PrefetchFence, HOST),
        (PrefetchFence, STORAGE),
        (NoHostWait, STORAGE),  # what is pinned for good is never overwritten
        (NoHostWait, DEVICE),  # while it is loaded
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
    """A pass is left in mid-layer, its computation still to run, and the slot is taken back."""
    weights = write_weights(tmp_path, [[9000], [5000], [12_000]])

    def leave_and_go_on(device: FakeDevice) -> None:
        with streaming(tiered(weights, lambda i, j: HOST), device) as streamer:
            pinned = streamer.layer(0)
            tensors = pinned.__enter__()
            device.compute(lambda: weights.check(0, tensors))
            streamer.restart()
            run_passes(streamer, device, weights, 2)

    leave_and_go_on(FakeDevice(Policy.PREFETCH, Policy.LATE))
    free = SlotRing._free

    def free_without_fence(ring: SlotRing, slot: Slot) -> None:
        fence = slot.fence
        free(ring, slot)
        slot.fence = fence

    monkeypatch.setattr(SlotRing, "_free", free_without_fence)
    assert has_seen_wrong_bytes(lambda: leave_and_go_on(FakeDevice(Policy.PREFETCH, Policy.LATE)))
