"""T_pass(N): how long a pass of N rows takes a model whose layers are placed as planned.

Every layer is read, as far as it streams, and multiplied with: the ring of slots is simulated over
their real order and sizes (`offload.residency.simulation`), with this machine's bandwidth and
arithmetic; so are the copies to a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from backends.contract.source import ModelCompute
from offload.residency.placement import Placement
from offload.residency.simulation import LayerWork, Overlap, SimulatedPass, simulate_passes
from specdec.policy.costs import PassCost

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_GPU_ROWS = (*_ROWS, 256, 512, 1024)
_FEW_ROWS = 16
_ABOVE_THE_KNEE = 1.05
"""Of one row's seconds: passes that take so much longer are held up by their rows."""


@dataclass(frozen=True)
class PassModel:
    """One model, placed, on one machine."""

    placement: Placement
    compute: ModelCompute
    storage_bytes_per_second: float
    copy_bytes_per_second: float = 0.0
    """From pinned host memory to a GPU's; of use where a GPU computes."""
    expert_seconds_per_byte: float = 0.0
    """Of experts that are missing, beside what the storage's bandwidth says: their reads are short,
    and their pages are taken from other experts."""
    _known: dict[tuple[int, float], SimulatedPass] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def times(self, n_rows: int, gap_seconds: float = 0.0) -> SimulatedPass:
        """A pass in the midst of others that drafting of `gap_seconds` parts."""
        key = (n_rows, gap_seconds)
        if key not in self._known:
            self._known[key] = self._simulate(n_rows, gap_seconds)
        return self._known[key]

    @property
    def expert_bytes_per_second(self) -> float:
        """Of experts that are missing, all told."""
        return 1.0 / (1.0 / self.storage_bytes_per_second + self.expert_seconds_per_byte)

    def seconds(self, n_rows: int) -> float:
        """Of a pass that follows the one before it at once."""
        return self.times(n_rows).seconds

    def cost(self) -> PassCost:
        """As the larger of two: one row's pass, and a line through those that rows hold up."""
        # Nothing hides rows: a few of them count. Nor are experts' reads hidden, of which every row
        # asks for some.
        if not self.placement.n_moving_layers or self.placement.experts is not None:
            return PassCost(0.0, *_line(1, self.seconds(1), _FEW_ROWS, self.seconds(_FEW_ROWS)))
        rows = _GPU_ROWS if self.placement.is_on_device else _ROWS
        seconds = {n: self.seconds(n) for n in rows}
        floor = seconds[1]
        above = [n for n in rows if seconds[n] > _ABOVE_THE_KNEE * floor]
        low = min(above, default=rows[-2])
        low, high = min(low, rows[-2]), rows[-1]
        # Reads that hide all of the rows say nothing about the line: arithmetic alone does.
        line = seconds if above else {n: self._compute_seconds(n) for n in (low, high)}
        return PassCost(floor, *_line(low, line[low], high, line[high]))

    def _simulate(self, n_rows: int, gap_seconds: float) -> SimulatedPass:
        placed, per_byte = self.placement, self.compute.per_byte
        is_copied = placed.is_on_device
        # A GPU's arithmetic neither reads nor copies slow down.
        overlap = Overlap() if is_copied else Overlap(compute=per_byte.beside_factor(n_rows))
        moving = 0.0 if is_copied else self.compute.seconds_per_streamed_byte
        seconds = per_byte.seconds(n_rows)
        layers = [
            LayerWork(
                layer.slot_bytes / self.storage_bytes_per_second,
                seconds * layer.n_bytes
                + moving * layer.slot_bytes
                + self._expert_seconds(index, n_rows),
                layer.copied_bytes / self.copy_bytes_per_second if is_copied else 0.0,
            )
            for index, layer in enumerate(placed.layers)
        ]
        return simulate_passes(
            layers,
            placed.n_slots,
            placed.n_device_slots,
            outer_seconds=self.compute.outer_seconds(n_rows),
            gap_seconds=gap_seconds,
            overlap=overlap,
        )

    def _expert_seconds(self, layer: int, n_rows: int) -> float:
        """Of a layer's routed experts: those that are missing are read, and then all computed."""
        room = self.placement.experts
        experts = None if room is None else room.layers[layer]
        if room is None or experts is None:
            return 0.0
        per_byte = self.compute.per_byte.seconds(experts.rows_each(n_rows))
        missing_seconds = room.read_bytes(layer, n_rows) / self.expert_bytes_per_second
        return missing_seconds + per_byte * experts.used_bytes(n_rows)

    def _compute_seconds(self, n_rows: int) -> float:
        n_bytes = sum(layer.n_bytes for layer in self.placement.layers)
        return self.compute.per_byte.seconds(n_rows) * n_bytes + self.compute.outer_seconds(n_rows)


def _line(n_low: int, low: float, n_high: int, high: float) -> tuple[float, float]:
    """(seconds of no rows, seconds per row) of the line through two points.

    A steep line is below zero where there are no rows, and it must be: raised to zero it would be
    above what was measured at the lower point.
    """
    slope = max((high - low) / (n_high - n_low), 1e-12)
    return low - slope * n_low, slope
