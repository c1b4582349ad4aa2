"""Models that want memory for their layers: of the host alone, or of a GPU and the host.

Host memory is told of in bytes without further name, a GPU's as *device* bytes. What of a model
must be where is the same for every kind of tenant: `least_device_bytes`, then, with so many device
bytes left to it, `least_bytes`, then `place`, then `reserve`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

from backends.contract.source import ModelSource
from offload.budget import MemoryBudget
from offload.device.loading import LOAD_STAGING_BYTES
from offload.device.planner import (
    OnDevice,
    TieredPlan,
    choose_on_device,
    least_on_device,
    most_device_bytes,
    place_rest,
    smallest_host_bytes,
)
from offload.device.tiers import DEFAULT_N_DEVICE_SLOTS
from offload.residency.plan import DEFAULT_N_SLOTS, ResidencyPlan, plan_residency

_PLENTY_BYTES = 1 << 62


@dataclass(frozen=True)
class Rings:
    """How deep the rings of a model are; None where that is open."""

    n_slots: int | None = None
    """In host memory; open: 3, or 2 where that saves a tenth of the reads."""
    n_device_slots: int = DEFAULT_N_DEVICE_SLOTS


@dataclass(frozen=True)
class Ledgers:
    """What memory is reserved in."""

    host: MemoryBudget
    vram: MemoryBudget | None = None
    """Of the GPU, if there is one."""


@dataclass(frozen=True)
class Tenant(ABC):
    """A model that wants memory for its layers."""

    source: ModelSource
    load_mode: str
    n_slots: int | None
    """What the user fixed."""

    @cached_property
    def all_bytes(self) -> int:
        """Memory that holds all layers where they are computed with."""
        return self.everything.total_bytes

    @cached_property
    def everything(self) -> ResidencyPlan:
        """All layers in host memory; knows the least that streaming takes, too."""
        return plan_residency(self.source.layers, _PLENTY_BYTES, n_slots=self.n_slots)

    def least_device_bytes(self, rings: Rings) -> int:
        """Of the GPU's memory."""
        return 0

    @abstractmethod
    def least_bytes(self, device_bytes: int, rings: Rings) -> int:
        """Of host memory: enough to run, with so much of the GPU's."""

    @abstractmethod
    def place(self, n_bytes: int, device_bytes: int, rings: Rings) -> ResidencyPlan:
        """The layers' places within so much memory, which is at least the least.

        Raises BudgetExceeded where a ring does not fit.
        """

    @abstractmethod
    def reserve(self, ledgers: Ledgers, plan: ResidencyPlan, rings: Rings, prefix: str) -> None:
        """Set aside what `place` planned for."""


class HostTenant(Tenant):
    """Computed with on the CPU: in memory, or streamed from storage."""

    @cached_property
    def _least_bytes(self) -> int:
        """All streamed, or all resident where that is less or asked for."""
        if self.load_mode == "mmap":
            return 0
        if self.load_mode == "ram":
            return self.everything.total_bytes
        streamed = self.everything.smallest_bytes + self._overhead_bytes(self.n_slots)
        return min(self.everything.total_bytes, streamed)

    def least_bytes(self, device_bytes: int, rings: Rings) -> int:
        return self._least_bytes

    def place(self, n_bytes: int, device_bytes: int, rings: Rings) -> ResidencyPlan:
        everything = self.everything
        if self.load_mode in ("mmap", "ram") or everything.total_bytes <= n_bytes:
            return everything
        n_slots = self.n_slots or rings.n_slots
        left = n_bytes - self._overhead_bytes(n_slots)
        return plan_residency(self.source.layers, left, n_slots=n_slots)

    def reserve(self, ledgers: Ledgers, plan: ResidencyPlan, rings: Rings, prefix: str) -> None:
        if self.load_mode == "mmap":
            return
        budget = ledgers.host
        budget.reserve(f"{prefix}pinned layers", plan.resident_bytes)
        budget.reserve(f"{prefix}ring", plan.ring_bytes)
        if plan.n_slots:
            overhead = self._overhead_bytes(self.n_slots or rings.n_slots)
            budget.reserve(f"{prefix}paging", overhead)

    def _overhead_bytes(self, n_slots: int | None) -> int:
        """What streaming takes beside a ring of that depth."""
        return self.source.streaming_overhead_bytes(n_slots or DEFAULT_N_SLOTS)


class GpuTenant(Tenant):
    """Computed with on the GPU: in its memory, or copied there from pinned host memory, which holds
    layers or is what they stream through."""

    def least_device_bytes(self, rings: Rings) -> int:
        return least_on_device(self.source.layers, rings.n_device_slots)

    def least_bytes(self, device_bytes: int, rings: Rings) -> int:
        on_device = self._on_device(device_bytes, rings.n_device_slots)
        if self.load_mode == "ram":
            least = self.place(_PLENTY_BYTES, device_bytes, rings).total_bytes
        else:
            n_slots = self.n_slots or rings.n_slots
            least = smallest_host_bytes(self.source.layers, on_device, n_slots)
        return max(least, LOAD_STAGING_BYTES)

    def place(self, n_bytes: int, device_bytes: int, rings: Rings) -> TieredPlan:
        return place_rest(
            self.source.layers,
            self._on_device(device_bytes, rings.n_device_slots),
            n_bytes,
            n_slots=self.n_slots or rings.n_slots,
            n_device_slots=rings.n_device_slots,
        )

    def reserve(self, ledgers: Ledgers, plan: ResidencyPlan, rings: Rings, prefix: str) -> None:
        budget, vram = ledgers.host, ledgers.vram
        assert isinstance(plan, TieredPlan)
        assert vram is not None
        vram.reserve(f"{prefix}layers", plan.tiers.device_resident_bytes)
        vram.reserve(f"{prefix}slots", plan.tiers.device_ring_bytes)
        budget.reserve(f"{prefix}pinned layers", plan.resident_bytes)
        budget.reserve(f"{prefix}ring", plan.ring_bytes)
        # Taken before the others and given back by then.
        budget.reserve(f"{prefix}loading", max(0, LOAD_STAGING_BYTES - plan.total_bytes))

    def _on_device(self, device_bytes: int, n_device_slots: int) -> OnDevice:
        """The same for all that is weighed with so much of the GPU's memory."""
        key = device_bytes, n_device_slots
        if key not in self._chosen:
            self._chosen[key] = choose_on_device(self.source.layers, device_bytes, n_device_slots)
        return self._chosen[key]

    @cached_property
    def _chosen(self) -> dict[tuple[int, int], OnDevice]:
        return {}


class GpuResident(GpuTenant):
    """Wholly in the GPU's memory, as a draft is that runs there."""

    @cached_property
    def all_bytes(self) -> int:
        return self.least_device_bytes(Rings())

    def least_device_bytes(self, rings: Rings) -> int:
        everything = tuple(frozenset(r.name for r in one.tensors) for one in self.source.layers)
        return most_device_bytes(self.source.layers, everything, rings.n_device_slots)
