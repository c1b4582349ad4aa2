"""MemoryPlan: the division of a memory budget between two models, and the choices behind it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from backends.contract.source import KvSplit, ModelSource, StoredKv
from offload.budget import MemoryBudget
from offload.placement.placement import Placement
from offload.placement.tiers import CUDA_CONTEXT_BYTES, VRAM
from specdec.planning.memory.pinnable import PinnableMemory
from specdec.run_options import CPU


@dataclass(frozen=True)
class Shape:
    """The choices by which memory plans for the same budget differ."""

    n_drafted: int
    """Draft tokens of the largest tree that memory is reserved for."""
    draft_device: str | None = CPU
    """Device of the draft; None leaves the draft out."""
    kv_tokens: int | None = None
    """Capacity of the KV caches, in tokens of all sequences; None: the minimum."""
    kv_split: KvSplit | None = None
    """Part of the target's KV cache that is in memory; None: all of it."""


@dataclass(frozen=True)
class Gpu:
    """The GPU that the target runs on."""

    vram_bytes: int
    """VRAM that the process may use."""
    vram_source: str
    """Origin of `vram_bytes`, for the user."""
    target: ModelSource
    """The target as it runs on the GPU."""
    cpu_draft: ModelSource | None = None
    """The draft as it would run beside the GPU; None where it must not."""
    draft: ModelSource | None = None
    """The draft as it would run on the GPU; None where it cannot."""
    host_bytes: int = 0
    """Host memory that its libraries will take beyond what the process takes already."""
    used_bytes: int = 0
    """VRAM of other models of the process."""
    warnings: tuple[str, ...] = ()
    """Warnings about the GPU for the user of a plan."""

    @property
    def base_bytes(self) -> int:
        """Part of `vram_bytes` that is taken before this run."""
        return CUDA_CONTEXT_BYTES + self.used_bytes


@dataclass(frozen=True)
class MinBudget:
    """The smallest budgets that work, in bytes."""

    host_bytes: int
    vram_bytes: int = 0
    """Smallest VRAM budget; 0 without a GPU."""

    def of(self, ledger: str) -> int:
        """Return the budget of one ledger, named as in errors."""
        return self.vram_bytes if ledger == VRAM else self.host_bytes

    def at_most(self, total_bytes: int) -> MinBudget:
        """Return the smallest budgets, of which one that works is known: they differ by jitter."""
        return replace(self, host_bytes=min(self.host_bytes, total_bytes))


@dataclass(frozen=True)
class MemoryPlan:
    """Division of the memory between the parts of two models."""

    budget: MemoryBudget
    target: Placement
    draft: Placement | None
    ctx_size: int
    kv_tokens: int
    """Capacity of the target's KV cache, in tokens of all sequences together."""
    shape: Shape
    smallest: MinBudget
    """The smallest budgets that work for this plan: with the draft if it has one."""
    smallest_alone: MinBudget
    """The smallest budgets that work without a draft model."""
    vram: MemoryBudget | None = None
    """The GPU's ledger, if the target runs there."""
    stored_kv: StoredKv | None = None
    """The target's KV cache, if a part of it is in a file."""
    pinnable: PinnableMemory = PinnableMemory()
    """Unused memory that pins the target's layers while it decodes."""

    @property
    def n_drafted(self) -> int:
        """Draft tokens of the largest tree that memory is reserved for."""
        return self.shape.n_drafted
