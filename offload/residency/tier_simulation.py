"""How long a pass takes whose weights come over three tiers, simulated in seconds.

    storage --read--> pinned slot --copy--> device slot --compute--> free again

Reads, copies and computing run beside each other, each one layer at a time and in the order of use.
A read waits for a pinned slot, which is free when its copy has ended; a copy waits for its read and
for a device slot, which is free when its layer has been computed; computing waits for its copy. A
layer that is pinned in host memory has no read, one in the device's memory neither. Between passes
reads and copies go on as far as there are slots.

In the steady state a pass takes as long as the slowest of the three, if there are slots enough.
Nothing slows anything else here: copies are the device's own work, and take little of what host
memory can deliver.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from offload.residency.ring_simulation import RingTimes, mean_times

_MAX_PASSES = 64
_SAME_STATE = 1e-9
"""Of what a pass takes: two states closer than this are the same."""


@dataclass(frozen=True)
class TierWork:
    """What one layer asks of the machine, each alone."""

    read_seconds: float  # 0: in host memory, or the device's
    copy_seconds: float  # 0: in the device's memory, and then nothing is read either
    compute_seconds: float

    def __post_init__(self) -> None:
        if self.read_seconds > 0 and self.copy_seconds <= 0:
            raise ValueError("what is read from storage is copied to the device")


def simulate_tiers(
    layers: Sequence[TierWork],
    n_host_slots: int,
    n_device_slots: int,
    *,
    outer_seconds: float = 0.0,
    gap_seconds: float = 0.0,
) -> RingTimes:
    """The mean pass once the rings repeat themselves.

    Args:
        layers: in the order of use.
        n_host_slots: pinned slots; no more than layers that are read are used.
        n_device_slots: no more than layers that are copied are used.
        outer_seconds: computing after the last layer (the head).
        gap_seconds: what lies between two passes (drafting); copies and reads go on meanwhile.
    """
    n_read = sum(1 for layer in layers if layer.read_seconds > 0)
    n_copied = sum(1 for layer in layers if layer.copy_seconds > 0)
    if (n_read and n_host_slots < 1) or (n_copied and n_device_slots < 1):
        raise ValueError(f"tiers need slots, not {n_host_slots} and {n_device_slots}")
    state = _Tiers(min(n_host_slots, n_read), min(n_device_slots, n_copied))
    seen: list[tuple[float, ...]] = []
    passes: list[RingTimes] = []
    tolerance = _SAME_STATE * max(1e-12, _total_seconds(layers) + outer_seconds + gap_seconds)
    while len(passes) < _MAX_PASSES:
        now = state.relative()
        for n_before, then in enumerate(seen):
            if all(abs(a - b) <= tolerance for a, b in zip(now, then, strict=True)):
                return mean_times(passes[n_before:])
        seen.append(now)
        passes.append(state.run_pass(layers, outer_seconds, gap_seconds))
    return mean_times(passes[_MAX_PASSES // 2 :])


def _total_seconds(layers: Sequence[TierWork]) -> float:
    return sum(one.read_seconds + one.copy_seconds + one.compute_seconds for one in layers)


class _Tiers:
    """When each of the three is free next, and when each slot is."""

    def __init__(self, n_host_slots: int, n_device_slots: int) -> None:
        self._now = self._read_end = self._copy_end = 0.0
        # When the slot was given back that the next read, or copy, goes into: the oldest first.
        self._host_slots = deque([0.0] * n_host_slots)
        self._device_slots = deque([0.0] * n_device_slots)

    def relative(self) -> tuple[float, ...]:
        """All that the next passes depend on."""
        times = (self._read_end, self._copy_end, *self._host_slots, *self._device_slots)
        return tuple(time - self._now for time in times)

    def run_pass(
        self, layers: Sequence[TierWork], outer_seconds: float, gap_seconds: float
    ) -> RingTimes:
        began, stall_seconds = self._now, 0.0
        for layer in layers:
            if layer.copy_seconds > 0:
                arrived = self._bring(layer)
                stall_seconds += max(0.0, arrived - self._now)
                self._now = max(self._now, arrived) + layer.compute_seconds
                self._device_slots.append(self._now)
            else:
                self._now += layer.compute_seconds
        self._now += outer_seconds
        seconds = self._now - began
        self._now += gap_seconds
        return RingTimes(seconds, stall_seconds, gap_seconds)

    def _bring(self, layer: TierWork) -> float:
        """When the layer is on the device: read, if it has to be, and copied."""
        may_begin = max(self._copy_end, self._device_slots.popleft())
        if layer.read_seconds > 0:
            self._read_end = max(self._read_end, self._host_slots.popleft()) + layer.read_seconds
            may_begin = max(may_begin, self._read_end)
        self._copy_end = may_begin + layer.copy_seconds
        if layer.read_seconds > 0:
            self._host_slots.append(self._copy_end)
        return self._copy_end
