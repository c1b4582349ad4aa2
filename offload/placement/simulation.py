"""Simulated seconds of a forward pass whose layers move.

    storage --read--> slot in host memory --> compute                          on the CPU
    storage --read--> slot in host memory --copy--> slot on a device --> compute

Layers are used in order, over and over. A streamed layer is read; a layer that a device computes
but that is not resident there is copied; the others are where they are computed. Reads follow each
other, and so do copies, each into a slot as soon as one is free: a slot of the host is free when
its layer was copied (or computed, without a device), a slot of the device when its layer was
computed. A pass stalls if a layer has not arrived. Between passes reads and copies go on as far as
there are free slots, which hides as much of what happens there (drafting).

Reading and computing slow each other on a CPU: a virtual disk is served by the processor that
computes, and both use its memory. `Overlap` says by how much, while both run. Copies are done by
the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MAX_PASSES = 64
"""The rings repeat themselves after a few passes; if not, the later half is averaged."""
_SAME_STATE = 1e-9
"""Share of all that a pass has moved: two states closer than this are the same."""


@dataclass(frozen=True)
class LayerWork:
    """Seconds of one layer's steps, each alone."""

    read_seconds: float  # 0: in memory
    compute_seconds: float
    copy_seconds: float = 0.0  # 0: in the device's memory, or computed on the CPU


@dataclass(frozen=True)
class Overlap:
    """Slowdown factors of reading and computing while both run."""

    read: float = 1.0
    compute: float = 1.0


@dataclass(frozen=True)
class SimulatedPass:
    """One pass of many, in seconds."""

    seconds: float  # from its beginning to its end
    stall_seconds: float  # of these, waiting for a layer
    gap_seconds: float  # the time between two passes, contention with reads included

    @property
    def cycle_seconds(self) -> float:
        """Seconds from the beginning of a pass to the beginning of the next."""
        return self.seconds + self.gap_seconds


def simulate_passes(
    layers: Sequence[LayerWork],
    n_slots: int,
    n_device_slots: int = 0,
    *,
    non_layer_seconds: float = 0.0,
    gap_seconds: float = 0.0,
    overlap: Overlap = Overlap(),
) -> SimulatedPass:
    """Return the mean pass once the rings repeat themselves.

    Args:
        layers: in the order of use.
        n_slots: slots that files are read to; at most one per layer that is read.
        n_device_slots: slots that are copied to; at most one per layer that is copied.
        non_layer_seconds: computing after the last layer (the head).
        gap_seconds: computing between two passes that is not the pass's own (drafting).
    """
    mover = _Mover(layers, n_slots, n_device_slots, overlap)
    seen: list[tuple[float, ...]] = []
    passes: list[SimulatedPass] = []
    tolerance = _SAME_STATE * sum(layer.read_seconds + layer.copy_seconds for layer in layers)
    while len(passes) < _MAX_PASSES:
        state = mover.state
        for n_before, earlier in enumerate(seen):
            if all(abs(a - b) <= tolerance for a, b in zip(state, earlier, strict=True)):
                return _mean(passes[n_before:])
        seen.append(state)
        passes.append(_one_pass(mover, layers, non_layer_seconds, gap_seconds))
    return _mean(passes[_MAX_PASSES // 2 :])


def _one_pass(
    mover: _Mover, layers: Sequence[LayerWork], non_layer_seconds: float, gap_seconds: float
) -> SimulatedPass:
    seconds = stall_seconds = 0.0
    for layer in layers:
        if layer.read_seconds > 0 or layer.copy_seconds > 0:
            stalled = mover.take()
            stall_seconds += stalled
            seconds += stalled + mover.compute(layer.compute_seconds)
            mover.release()
        else:
            seconds += mover.compute(layer.compute_seconds)
    seconds += mover.compute(non_layer_seconds)
    return SimulatedPass(seconds, stall_seconds, mover.compute(gap_seconds))


def _mean(passes: Sequence[SimulatedPass]) -> SimulatedPass:
    """Return the mean of each field."""
    n = len(passes)
    return SimulatedPass(
        sum(simulated.seconds for simulated in passes) / n,
        sum(simulated.stall_seconds for simulated in passes) / n,
        sum(simulated.gap_seconds for simulated in passes) / n,
    )


class _Stage:
    """Reads, or copies: the layer being moved, and how much of it is left."""

    def __init__(
        self, seconds: Sequence[float], n_slots: int, source: _Stage | None, taken: Sequence[bool]
    ) -> None:
        """source, taken: the stage before, and whether it has a slot for each of the layers."""
        if seconds and n_slots < 1:
            raise ValueError(f"streaming needs a slot, not {n_slots}")
        self._seconds, self._source, self._taken = seconds, source, taken
        self.n_free = min(n_slots, len(seconds))
        self._next = 0
        self._is_taking = False
        self.n_ready = 0
        """Layers that have arrived and are not in use."""
        self.seconds_left = 0.0
        """Seconds left of the layer being moved; 0 if none is."""

    def go_on(self) -> None:
        """Begin with the next layer, if it is available and a slot is free."""
        if self.seconds_left > 0 or not self.n_free:
            return
        takes = self._source is not None and self._taken[self._next]
        if takes and self._source is not None:
            if not self._source.n_ready:
                return
            self._source.n_ready -= 1
        self._is_taking = takes
        self.n_free -= 1
        self.seconds_left = self._seconds[self._next]
        self._next = (self._next + 1) % len(self._seconds)

    def reach(self) -> None:
        self.n_ready += 1
        self.seconds_left = 0.0
        if self._is_taking and self._source is not None:
            self._source.n_free += 1


class _Mover:
    """Both stages; the last existing one hands layers to the pass."""

    def __init__(
        self, layers: Sequence[LayerWork], n_slots: int, n_device_slots: int, overlap: Overlap
    ) -> None:
        copied = [layer for layer in layers if layer.copy_seconds > 0]
        reads = [layer.read_seconds for layer in layers if layer.read_seconds > 0]
        if copied and len(reads) > sum(1 for layer in copied if layer.read_seconds > 0):
            raise ValueError("of a model on a device, what is read from storage is copied to it")
        self._overlap = overlap
        reader = self._last = _Stage(reads, n_slots, None, ())
        self._stages = [reader] if reads else []
        if copied:
            copies = [layer.copy_seconds for layer in copied]
            taken = [layer.read_seconds > 0 for layer in copied]
            self._last = _Stage(copies, n_device_slots, reader, taken)
            self._stages.append(self._last)
        self._go_on()

    @property
    def state(self) -> tuple[float, ...]:
        """Everything that the next passes depend on, between two of them."""
        return tuple(x for stage in self._stages for x in (stage.n_ready, stage.seconds_left))

    def take(self) -> float:
        """Wait for the next layer; return the seconds waited."""
        waited = 0.0
        while not self._last.n_ready:
            first = self._first()
            waited += first
            self._pass_by(first, 1.0)
        self._last.n_ready -= 1
        return waited

    def release(self) -> None:
        self._last.n_free += 1
        self._go_on()

    def compute(self, work: float) -> float:
        """Compute what takes `work` seconds alone; return the seconds that it takes."""
        took = 0.0
        while work > 0 and (left := self._first()) > 0:
            to_compute = work * self._overlap.compute
            to_reach = left * self._overlap.read
            step = min(to_reach, to_compute)
            took += step
            self._pass_by(step, self._overlap.read)
            is_done = to_compute < to_reach
            work = 0.0 if is_done else max(0.0, work - step / self._overlap.compute)
        return took + work

    def _first(self) -> float:
        """Return the seconds until the first stage has moved its layer; 0 if none is moving."""
        return min((s.seconds_left for s in self._stages if s.seconds_left > 0), default=0.0)

    def _pass_by(self, seconds: float, slowed: float) -> None:
        """Let `seconds` pass; layers being moved take `slowed` times as long."""
        for stage in self._stages:
            if stage.seconds_left > 0:
                has_arrived = stage.seconds_left * slowed <= seconds
                stage.seconds_left = max(0.0, stage.seconds_left - seconds / slowed)
                if has_arrived or stage.seconds_left == 0:  # the latter of rounding
                    stage.reach()
        self._go_on()

    def _go_on(self) -> None:
        for stage in self._stages:
            stage.go_on()
