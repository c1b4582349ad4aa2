"""Lower bound of a pass's time on a device, and the tier that binds it.

Four tiers may bind: arithmetic ("compute"), the memory that it reads from ("memory"), the link to a
GPU ("pcie") and storage. Williams, Waterman and Patterson 2009, with the slower tiers beside DRAM:
an operator takes as long as its slowest tier. A pass reads ahead, so its transfers overlap with all
of its arithmetic: it takes the longest of its reads from storage, of its transfers over the link,
and of its operators one after the other in memory and arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from backends.shapes.shape import HEAD, ModelShape
from specdec.analysis.experts import ExpertCache, expert_cache
from specdec.analysis.operators import ATTENTION, STATES, Work, pass_work
from specdec.devices.spec import DeviceSpec

COMPUTE, MEMORY, PCIE, STORAGE = "compute", "memory", "pcie", "storage"
TIERS = (COMPUTE, MEMORY, PCIE, STORAGE)
FREE_SLACK = 0.05
"""Relative slack within which a pass of n tokens counts as free compared to a pass of 1."""


@dataclass(frozen=True)
class TierShares:
    """Distribution of a model's bytes; the layers are evenly spread over the tiers.

    On a CPU, routed experts come last: the remaining memory is a cache of them. On a GPU they
    count as parts of the layers.
    """

    layer_bytes: int
    streamed_bytes: int
    """Layer bytes read from storage in every pass, without experts in a cache."""
    linked_bytes: int
    """Layer bytes sent over the link to the GPU in every pass."""
    missing_bytes: int
    """Bytes of embedding, head, KV cache and states that do not fit even without any layer."""
    experts: ExpertCache | None = None

    @property
    def storage_share(self) -> float:
        """Streamed share of the layer bytes that every pass needs."""
        expert_bytes = self.experts.n_bytes if self.experts is not None else 0
        return self.streamed_bytes / (self.layer_bytes - expert_bytes)

    @property
    def link_share(self) -> float:
        return self.linked_bytes / self.layer_bytes


def place(model: ModelShape, context: int, device: DeviceSpec) -> TierShares:
    """Place embedding, head, KV cache and states of `context` tokens in memory, then the layers.

    On a GPU those stay in its own memory, and layers that do not fit there cross the link, from the
    host's memory or through it.
    """
    staying = model.non_layer_bytes + model.sequence_bytes(context)
    fast_bytes = device.vram_bytes if device.pcie_bytes_per_second else device.memory_bytes
    beyond_fast = max(0, model.layer_bytes - max(0, fast_bytes - staying))
    missing = max(0, staying - fast_bytes)
    if device.pcie_bytes_per_second:
        streamed = max(0, beyond_fast - device.memory_bytes)
        return TierShares(model.layer_bytes, streamed, beyond_fast, missing)
    if not model.expert_bytes:
        return TierShares(model.layer_bytes, beyond_fast, 0, missing)
    experts = expert_cache(model, context, fast_bytes)
    beyond_fast = max(0, beyond_fast - model.expert_bytes)
    return TierShares(model.layer_bytes, beyond_fast, 0, missing, experts)


@dataclass(frozen=True)
class OperatorBound:
    """Lower bound of one operator's time in one pass on one device."""

    name: str
    work: Work
    seconds: Mapping[str, float]
    """Seconds by tier, each as if it were the only one."""

    @property
    def bound_by(self) -> str:
        return max(TIERS, key=lambda tier: self.seconds[tier])

    @property
    def min_seconds(self) -> float:
        return self.seconds[self.bound_by]

    @property
    def resident_seconds(self) -> float:
        """Seconds once the weights are in the memory that the arithmetic reads from."""
        return max(self.seconds[COMPUTE], self.seconds[MEMORY])


@dataclass(frozen=True)
class PassBound:
    """Lower bound of the time of one pass over all layers and the head."""

    n_tokens: int
    context: int
    operators: tuple[OperatorBound, ...]

    def tier_seconds(self, tier: str) -> float:
        return sum(operator.seconds[tier] for operator in self.operators)

    @property
    def seconds(self) -> float:
        """Lower bound of the pass's seconds."""
        resident = sum(operator.resident_seconds for operator in self.operators)
        return max(resident, self.tier_seconds(PCIE), self.tier_seconds(STORAGE))

    @property
    def bound_by(self) -> str:
        """The tier of a transfer that takes all of the pass, else the operators' slowest tier."""
        for tier in (STORAGE, PCIE):
            if self.tier_seconds(tier) >= self.seconds:
                return tier
        return max((COMPUTE, MEMORY), key=self.tier_seconds)

    @property
    def bandwidth_seconds(self) -> float:
        """Lower bound of the seconds without arithmetic."""
        return max(self.tier_seconds(tier) for tier in (MEMORY, PCIE, STORAGE))

    def share(self, operator: OperatorBound) -> float:
        """Return the operator's share of the sum of all operators' minimum times."""
        return operator.min_seconds / sum(bound.min_seconds for bound in self.operators)


def pass_bound(
    model: ModelShape,
    device: DeviceSpec,
    placement: TierShares,
    n_tokens: int,
    context: int,
    n_logits: int,
) -> PassBound:
    work = pass_work(model, n_tokens, context, n_logits)
    return PassBound(
        n_tokens,
        context,
        tuple(
            OperatorBound(name, operator, _tier_seconds(name, operator, device, placement))
            for name, operator in work.items()
        ),
    )


def _tier_seconds(
    name: str, work: Work, device: DeviceSpec, placement: TierShares
) -> dict[str, float]:
    is_in_layers = name not in (ATTENTION, STATES, HEAD)  # these stay in memory
    linked = work.stored_bytes * placement.link_share if is_in_layers else 0.0
    missed = 0.0
    dense_bytes = work.stored_bytes
    if placement.experts is not None:
        dense_bytes -= work.expert_bytes
        missed = work.expert_bytes * (1 - placement.experts.hit_rate)
    streamed = dense_bytes * placement.storage_share + missed if is_in_layers else 0.0
    flops = work.flops_by_format.items()
    return {
        COMPUTE: sum(n / device.flops(number_format) for number_format, n in flops),
        MEMORY: work.n_bytes / device.dram_bytes_per_second,
        PCIE: linked / device.pcie_bytes_per_second if device.pcie_bytes_per_second else 0.0,
        STORAGE: streamed / device.storage_bytes_per_second,
    }


def free_tokens(model: ModelShape, device: DeviceSpec, placement: TierShares, context: int) -> int:
    """Return the maximum tokens, up to `context`, verified in the time of one (FREE_SLACK)."""

    def seconds(n_tokens: int) -> float:
        return pass_bound(model, device, placement, n_tokens, context, n_tokens).seconds

    allowed = (1 + FREE_SLACK) * seconds(1)
    low, high = 1, context + 1  # low is free, high is not or out of range
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if seconds(middle) <= allowed else (low, middle)
    return low
