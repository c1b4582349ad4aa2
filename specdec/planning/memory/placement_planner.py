"""Planners of a model's layer placement within given host memory, or VRAM and host memory.

In names, `bytes` alone are host memory and `device_bytes` are VRAM. Every planner is called in the
same order: `min_device_bytes`; `min_bytes` with the device bytes that it gets; `place`; and `parts`
of the resulting placement.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property

from backends.contract.source import ModelSource
from offload.device.loading import LOAD_STAGING_BYTES
from offload.experts.cached import expected_decay
from offload.placement.experts import ExpertCachePlan, count_experts, min_slots, slot_bytes
from offload.placement.placement import LayerWeights, Placement
from offload.placement.plan import DEFAULT_N_SLOTS, min_host_bytes, plan_placement
from offload.placement.tiers import fill_device, fill_host, min_device_bytes, whole_device_bytes
from specdec.planning.memory.parts import Parts

_PLENTY_BYTES = 1 << 62


@dataclass(frozen=True)
class PlacementPlanner(ABC):
    """Planner of the layer placement of one model."""

    source: ModelSource
    load_mode: str
    n_slots: int | None = None
    """Depth of the ring in host memory; None: 3, or 2 where that saves a tenth of the reads."""

    def min_device_bytes(self) -> int:
        """Return the minimum VRAM that the model needs."""
        return 0

    @abstractmethod
    def min_bytes(self, device_bytes: int) -> int:
        """Return the minimum host memory to run with `device_bytes` of VRAM."""

    @abstractmethod
    def place(self, n_bytes: int, device_bytes: int) -> Placement:
        """Place the layers within this memory, which is at least the minimum.

        Raises BudgetExceeded where a ring does not fit.
        """

    @abstractmethod
    def parts(self, placement: Placement) -> Parts:
        """Return the parts to reserve for a placement."""


class CpuPlacementPlanner(PlacementPlanner):
    """Planner for layers that the CPU computes: in memory, or streamed from storage."""

    @cached_property
    def _everything(self) -> Placement:
        placement = plan_placement(self.source.layers, _PLENTY_BYTES)
        return self._with_experts(placement, count_experts(self.source.experts))

    def _with_experts(self, placement: Placement, n_slots: int) -> Placement:
        experts = self.source.experts
        if not experts:
            return placement
        return replace(placement, experts=ExpertCachePlan(experts, n_slots, self._decay))

    @cached_property
    def _decay(self) -> float:
        return expected_decay(self.source.experts)

    @cached_property
    def _min_expert_bytes(self) -> int:
        """Memory for the experts that one layer needs at a time."""
        experts = self.source.experts
        return min_slots(experts) * slot_bytes(experts)

    @property
    def all_bytes(self) -> int:
        """Memory that holds all layers."""
        return self._everything.host_bytes

    def min_bytes(self, device_bytes: int) -> int:
        """Return the bytes with all layers streamed, or all resident where smaller or requested."""
        if self.load_mode == "mmap":
            return 0
        if self.load_mode == "ram":
            return self.all_bytes
        streamed = min_host_bytes(self.source.layers, self.n_slots)
        return min(self.all_bytes, streamed + self._overhead_bytes + self._min_expert_bytes)

    def place(self, n_bytes: int, device_bytes: int) -> Placement:
        if self.load_mode in ("mmap", "ram") or self.all_bytes <= n_bytes:
            return self._everything
        # Every pass needs all of the dense weights: they are placed first.
        left = n_bytes - self._overhead_bytes - self._min_expert_bytes
        dense = plan_placement(self.source.layers, left, n_slots=self.n_slots)
        if not self.source.experts:
            return dense
        n_expert_bytes = n_bytes - self._overhead_bytes - dense.host_bytes
        return self._with_experts(dense, n_expert_bytes // slot_bytes(self.source.experts))

    def parts(self, placement: Placement) -> Parts:
        if self.load_mode == "mmap":
            return Parts()
        host = {"pinned layers": placement.resident_bytes, "ring": placement.ring_bytes}
        if placement.experts is not None:
            host["expert cache"] = placement.expert_bytes
        if placement.streams:
            host["paging"] = self._overhead_bytes
        return Parts(host)

    @cached_property
    def _overhead_bytes(self) -> int:
        """Memory that streaming takes beside the ring."""
        return self.source.streaming_overhead_bytes(self.n_slots or DEFAULT_N_SLOTS)


class GpuPlacementPlanner(PlacementPlanner):
    """Planner for layers that the GPU computes: in VRAM, or copied there from pinned host memory,
    which keeps layers or is a ring that they stream through."""

    def min_device_bytes(self) -> int:
        return min_device_bytes(self.source.layers)

    def min_bytes(self, device_bytes: int) -> int:
        if self.load_mode == "ram":
            minimum = self.place(_PLENTY_BYTES, device_bytes).host_bytes
        else:
            minimum = min_host_bytes(self._on_device(device_bytes), self.n_slots, is_on_device=True)
        return max(minimum, LOAD_STAGING_BYTES)

    def place(self, n_bytes: int, device_bytes: int) -> Placement:
        layers = self._on_device(device_bytes)
        return fill_host(layers, n_bytes, n_slots=self.n_slots)

    def parts(self, placement: Placement) -> Parts:
        host = {
            "pinned layers": placement.resident_bytes,
            "ring": placement.ring_bytes,
            # Allocated before the others and freed by then.
            "loading": max(0, LOAD_STAGING_BYTES - placement.host_bytes),
        }
        gpu = {"layers": placement.device_resident_bytes, "slots": placement.device_ring_bytes}
        return Parts(host, gpu)

    def _on_device(self, device_bytes: int) -> tuple[LayerWeights, ...]:
        """Return the layers with the VRAM filled; cached, as several predictions share a size."""
        if device_bytes not in self._filled:
            self._filled[device_bytes] = fill_device(self.source.layers, device_bytes)
        return self._filled[device_bytes]

    @cached_property
    def _filled(self) -> dict[int, tuple[LayerWeights, ...]]:
        return {}


class WholeGpuPlacementPlanner(GpuPlacementPlanner):
    """Planner for a model wholly in VRAM, such as a draft on the GPU."""

    def min_device_bytes(self) -> int:
        return whole_device_bytes(self.source.layers)
