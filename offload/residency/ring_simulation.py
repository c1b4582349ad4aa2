"""How long a streamed pass takes: the ring of slots, simulated in seconds.

Layers are used in order, over and over. Some come from storage, one after the other, each into a
slot of its own as soon as one is free; the others are in memory. A pass is held up where a layer
has not arrived. Between passes the storage goes on reading as far as there are free slots, which
hides as much of what happens there (drafting).

Reading and computing slow each other: a virtual disk is served by the processor that computes, and
both use its memory. `Overlap` says by how much, while both run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MAX_PASSES = 64
"""A ring comes to repeat itself after a few passes; where not, the later half is averaged."""
_SAME_STATE = 1e-9
"""Of a pass's reading: two states of the ring closer than this are the same."""


@dataclass(frozen=True)
class LayerWork:
    """What one layer asks of the machine, each alone."""

    read_seconds: float  # 0: resident
    compute_seconds: float


@dataclass(frozen=True)
class Overlap:
    """How many times as long each takes while both run."""

    read: float = 1.0
    compute: float = 1.0


@dataclass(frozen=True)
class RingTimes:
    """One pass of many, seconds."""

    seconds: float  # from its beginning to its end
    stall_seconds: float  # of these, waiting for storage
    gap_seconds: float  # what lay between two passes took, contention with reads included

    @property
    def cycle_seconds(self) -> float:
        """From the beginning of a pass to the beginning of the next."""
        return self.seconds + self.gap_seconds


def simulate_passes(
    layers: Sequence[LayerWork],
    n_slots: int,
    *,
    outer_seconds: float = 0.0,
    gap_seconds: float = 0.0,
    overlap: Overlap = Overlap(),
) -> RingTimes:
    """The mean pass once the ring repeats itself.

    Args:
        layers: in the order of use.
        n_slots: depth of the ring; no more than streamed layers are used.
        outer_seconds: computing after the last layer (the head).
        gap_seconds: computing between two passes that is not the pass's own (drafting).
    """
    reads = [layer.read_seconds for layer in layers if layer.read_seconds > 0]
    if reads and n_slots < 1:
        raise ValueError(f"streaming needs a slot, not {n_slots}")
    ring = _Ring(reads, n_slots, overlap)
    seen: list[tuple[int, float]] = []
    passes: list[RingTimes] = []
    tolerance = _SAME_STATE * sum(reads)
    while len(passes) < _MAX_PASSES:
        for n_before, (n_ready, seconds_left) in enumerate(seen):
            if n_ready == ring.n_ready and abs(seconds_left - ring.seconds_left) <= tolerance:
                return mean_times(passes[n_before:])
        seen.append((ring.n_ready, ring.seconds_left))
        passes.append(_one_pass(ring, layers, outer_seconds, gap_seconds))
    return mean_times(passes[_MAX_PASSES // 2 :])


def _one_pass(
    ring: _Ring, layers: Sequence[LayerWork], outer_seconds: float, gap_seconds: float
) -> RingTimes:
    seconds = stall_seconds = 0.0
    for layer in layers:
        if layer.read_seconds > 0:
            stalled = ring.take()
            stall_seconds += stalled
            seconds += stalled + ring.compute(layer.compute_seconds)
            ring.release()
        else:
            seconds += ring.compute(layer.compute_seconds)
    seconds += ring.compute(outer_seconds)
    return RingTimes(seconds, stall_seconds, ring.compute(gap_seconds))


def mean_times(passes: Sequence[RingTimes]) -> RingTimes:
    """Of each figure."""
    n = len(passes)
    return RingTimes(
        sum(one.seconds for one in passes) / n,
        sum(one.stall_seconds for one in passes) / n,
        sum(one.gap_seconds for one in passes) / n,
    )


class _Ring:
    """The reader's side: which layer is being read, and how much of it is left."""

    def __init__(self, reads: Sequence[float], n_slots: int, overlap: Overlap) -> None:
        self._reads = reads
        self._overlap = overlap
        self._n_free = min(n_slots, len(reads))
        self._next = 0
        self.n_ready = 0
        """Layers that have arrived and are not in use."""
        self.seconds_left = 0.0
        """Of the read that is running; 0 where none is."""
        self._read_on()

    def take(self) -> float:
        """Wait for the next layer; seconds waited."""
        waited = 0.0
        if self.n_ready == 0:
            waited = self.seconds_left
            self._arrive()
        self.n_ready -= 1
        return waited

    def release(self) -> None:
        self._n_free += 1
        if self.seconds_left == 0:
            self._read_on()

    def compute(self, work: float) -> float:
        """Compute what takes `work` seconds alone; the seconds that it takes."""
        took = 0.0
        while work > 0 and self.seconds_left > 0:
            to_compute = work * self._overlap.compute
            to_read = self.seconds_left * self._overlap.read
            if to_read <= to_compute:
                took += to_read
                work = max(0.0, work - to_read / self._overlap.compute)
                self._arrive()
            else:
                took += to_compute
                self.seconds_left = max(0.0, self.seconds_left - to_compute / self._overlap.read)
                if self.seconds_left == 0:  # of rounding
                    self._arrive()
                work = 0.0
        return took + work

    def _arrive(self) -> None:
        self.n_ready += 1
        self.seconds_left = 0.0
        self._read_on()

    def _read_on(self) -> None:
        if self._reads and self._n_free:
            self._n_free -= 1
            self.seconds_left = self._reads[self._next]
            self._next = (self._next + 1) % len(self._reads)
