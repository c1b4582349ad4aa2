"""Which layers stay in a device's memory, which in pinned host memory, and which on storage.

A pass computes on the device, beside copies to it, beside reads from storage; the slowest of the
three sets its time. What stays on the device saves its copy in every pass, and its read; what stays
in host memory saves its read. Both memories only save, so both are filled, the device's first. Each
is the same question: a memory holds a ring of slots through which the rest of the layers moves, and
a fixed set beside it that leaves the least to move. `offload.residency.plan` answers it, once for
the device's slots and once, with what is left, for the pinned ones. How many slots the two rings
have is the caller's to weigh, by the time of a pass (`offload.residency.tier_simulation`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.budget import BudgetExceeded
from offload.device.tiers import (
    DEFAULT_N_DEVICE_SLOTS,
    DEVICE_GRANULE_BYTES,
    TieredLayer,
    TierPlan,
    device_footprint,
)
from offload.residency.plan import MIN_N_SLOTS, LayerWeights, ResidencyPlan, plan_residency
from offload.storage.aligned import ALIGNMENT
from offload.storage.layout import MERGE_GAP_BYTES, make_layout

VRAM = "VRAM"
"""The device's ledger in errors and tables."""

OnDevice = tuple[frozenset[str], ...]
"""For each layer, the names of its tensors that stay on the device."""


@dataclass(frozen=True)
class TieredPlan(ResidencyPlan):
    """A `TierPlan` and its figures as those of a plan for host memory.

    `layers` are all layers; what stays on the device counts as resident in them. The other fields
    are of pinned host memory: `resident_bytes` and `ring_bytes` take nothing for the device.
    """

    tiers: TierPlan

    @property
    def n_moving_layers(self) -> int:
        """Layers of which something is copied to the device."""
        return self.tiers.n_copied_layers

    @property
    def moved_bytes(self) -> int:
        """Copied to the device in every pass."""
        return self.tiers.copied_bytes


def plan_tiers(
    layers: Sequence[LayerWeights],
    host_bytes: int,
    device_bytes: int,
    *,
    n_slots: int | None = None,
    n_device_slots: int = DEFAULT_N_DEVICE_SLOTS,
) -> TieredPlan:
    """Fill the device's memory, then the host's.

    Args:
        layers: in the order of use; their present resident sets are ignored.
        host_bytes: pinned memory for resident tensors and slots.
        device_bytes: device memory for resident tensors and slots.
        n_slots: pinned slots; None chooses as `plan_residency` does.
        n_device_slots: at most; fewer where fewer layers are copied.

    Raises:
        BudgetExceeded: not even the device's slots fit, or the smallest plan for the host.
    """
    on_device = choose_on_device(layers, device_bytes, n_device_slots)
    return place_rest(layers, on_device, host_bytes, n_slots=n_slots, n_device_slots=n_device_slots)


# --- the device ----------------------------------------------------------------------------------


def choose_on_device(
    layers: Sequence[LayerWeights], device_bytes: int, n_device_slots: int
) -> OnDevice:
    """The tensors that leave the fewest bytes to copy; what is left over fits in any split of it.

    Raises BudgetExceeded where neither the slots nor all layers fit.
    """
    if n_device_slots < 1:
        raise ValueError(f"the device needs at least one slot, not {n_device_slots}")
    bare = [layer.with_resident(frozenset()) for layer in layers]
    everything = tuple(frozenset(r.name for r in layer.tensors) for layer in bare)
    if most_device_bytes(bare, everything, n_device_slots) <= device_bytes:
        return everything
    nothing = tuple(frozenset[str]() for _ in bare)
    least = most_device_bytes(bare, nothing, n_device_slots)
    if least > device_bytes:
        raise BudgetExceeded(
            "streaming to the GPU", least, device_bytes, least_on_device(bare, n_device_slots),
            ledger=VRAM,
        )  # fmt: skip
    # What `plan_residency` does not know: memory comes in granules, and splits take a little more.
    available = device_bytes - (n_device_slots + 1) * DEVICE_GRANULE_BYTES
    while available > 0:
        try:
            plan = plan_residency(bare, available, n_slots=n_device_slots)
        except BudgetExceeded:
            return nothing
        chosen = tuple(layer.resident for layer in plan.layers)
        excess = most_device_bytes(bare, chosen, n_device_slots) - device_bytes
        if excess <= 0:
            return chosen
        available -= excess
    return nothing


def least_on_device(layers: Sequence[LayerWeights], n_device_slots: int) -> int:
    """Device memory that is enough: for slots alone, or for all layers where that is less."""
    everything = tuple(frozenset(r.name for r in layer.tensors) for layer in layers)
    nothing = tuple(frozenset[str]() for _ in layers)
    return min(most_device_bytes(layers, one, n_device_slots) for one in (nothing, everything))


def most_device_bytes(
    layers: Sequence[LayerWeights], on_device: OnDevice, n_device_slots: int
) -> int:
    """Device memory that these take, however the rest is split between host and storage."""
    tiers = [
        TieredLayer(layer.tensors, names) for layer, names in zip(layers, on_device, strict=True)
    ]
    held = {r.name: r for layer in tiers for r in layer.device_records}
    resident = device_footprint(make_layout(held.values(), merge_gap=0).n_bytes)
    slots = [layer.copied_bytes + _split_bytes(layer) for layer in tiers if layer.host.tensors]
    return resident + min(n_device_slots, len(slots)) * device_footprint(max(slots, default=0))


def _split_bytes(layer: TieredLayer) -> int:
    """What pinning a part of the layer may add to its slot: of each tensor the first and the last
    block, and small ones, which are read along with their neighbours."""
    small = (min(record.n_bytes, MERGE_GAP_BYTES) for record in layer.host.tensors)
    return sum(2 * ALIGNMENT + n_bytes for n_bytes in small)


# --- the host ------------------------------------------------------------------------------------


def place_rest(
    layers: Sequence[LayerWeights],
    on_device: OnDevice,
    host_bytes: int,
    *,
    n_slots: int | None = None,
    n_device_slots: int = DEFAULT_N_DEVICE_SLOTS,
) -> TieredPlan:
    """Divide what is not on the device between pinned memory and storage.

    Raises BudgetExceeded where the smallest plan does not fit.
    """
    rest = _rest(layers, on_device)
    smallest = smallest_host_bytes(layers, on_device, n_slots)
    if smallest > host_bytes:
        raise BudgetExceeded("streaming the weights", smallest, host_bytes, smallest)

    def tiered(pinned: Sequence[frozenset[str]], slots: int) -> TierPlan:
        by_layer = iter(pinned)
        return TierPlan(
            tuple(
                TieredLayer(
                    layer.tensors,
                    names,
                    next(by_layer) if len(names) < len(layer.tensors) else frozenset(),
                )
                for layer, names in zip(layers, on_device, strict=True)
            ),
            n_device_slots,
            slots,
        )

    everything = tiered([frozenset(r.name for r in layer.tensors) for layer in rest], 0)
    if everything.host_bytes <= host_bytes:
        return as_residency(layers, everything, smallest)
    # Each layer's pinned tensors have a buffer of their own, rounded up.
    available = host_bytes - 2 * ALIGNMENT * len(rest)
    while available > 0:
        try:
            plan = plan_residency(rest, available, n_slots=n_slots)
        except BudgetExceeded:
            break
        found = tiered([layer.resident for layer in plan.layers], plan.n_slots)
        excess = found.host_bytes - host_bytes
        if excess <= 0:
            return as_residency(layers, found, smallest)
        available -= excess
    streamed = tiered([frozenset()] * len(rest), n_slots or MIN_N_SLOTS)
    return as_residency(layers, streamed, smallest)


def smallest_host_bytes(
    layers: Sequence[LayerWeights], on_device: OnDevice, n_slots: int | None
) -> int:
    """Pinned memory that is enough: slots alone, or for all that is copied where that is less."""
    tiers = [TieredLayer(layer.tensors) for layer in _rest(layers, on_device)]
    pinned = [TieredLayer(one.tensors, in_host=_names(one)) for one in tiers]
    streamed = TierPlan(tuple(tiers), n_pinned_slots=n_slots or MIN_N_SLOTS)
    return min(streamed.host_bytes, TierPlan(tuple(pinned)).host_bytes)


def _rest(layers: Sequence[LayerWeights], on_device: OnDevice) -> list[LayerWeights]:
    """What of each layer is copied; layers that are wholly on the device are left out."""
    parts = (
        TieredLayer(layer.tensors, names).host
        for layer, names in zip(layers, on_device, strict=True)
    )
    return [part for part in parts if part.tensors]


def _names(layer: TieredLayer) -> frozenset[str]:
    return frozenset(record.name for record in layer.tensors)


def as_residency(
    layers: Sequence[LayerWeights], tiers: TierPlan, smallest_bytes: int
) -> TieredPlan:
    """`tiers`, as those who plan for host memory see it."""
    return TieredPlan(
        layers=tuple(
            layer.with_resident(one.on_device | one.in_host)
            for layer, one in zip(layers, tiers.layers, strict=True)
        ),
        n_slots=tiers.used_pinned_slots,
        slot_bytes=tiers.pinned_slot_bytes,
        resident_bytes=tiers.pinned_resident_bytes,
        ring_bytes=tiers.pinned_ring_bytes,
        streamed_bytes=tiers.streamed_bytes,
        smallest_bytes=smallest_bytes,
        tiers=tiers,
    )
