"""Placement of layers in a device's memory, in pinned host memory, and on storage.

A pass computes on the device, beside copies to it, beside reads from storage; the slowest of the
three sets its time. A tensor on the device saves its copy in every pass, and its read; a tensor in
host memory saves its read. Both memories only save, so both are filled, the device's first. Each is
the same problem: a memory has a ring of slots through which the other layers move, and a fixed set
beside it that leaves the least to move. `offload.placement.plan` solves it, once for the device's
slots and once, for the remaining layers, for the pinned ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from offload.budget import BudgetExceeded
from offload.placement.placement import (
    DEVICE_GRANULE_BYTES,
    N_DEVICE_SLOTS,
    LayerWeights,
    Placement,
    device_footprint,
)
from offload.placement.plan import MIN_N_SLOTS, min_host_bytes, pin_all, plan_placement
from offload.storage.aligned import ALIGNMENT, PAGE_BYTES
from offload.storage.layout import MERGE_GAP_BYTES
from offload.units import MIB

VRAM = "VRAM"
"""The device's ledger in errors and tables."""
CUDA_CONTEXT_BYTES = 512 * MIB
"""VRAM beside what torch allocates: the driver's context and the loaded kernels. Assumed."""

Layers = tuple[LayerWeights, ...]
PlacedT = TypeVar("PlacedT")


# --- the device ----------------------------------------------------------------------------------


def fill_device(layers: Sequence[LayerWeights], device_bytes: int) -> Layers:
    """Return the layers with those tensors on the device that leave the fewest bytes to copy.

    The others fit through the slots, however they are split between host and storage later.

    Args:
        layers: in the order of use; their present placement is ignored.
        device_bytes: memory of the device for resident tensors and for the slots.

    Raises BudgetExceeded if neither the slots nor all layers fit.
    """
    nothing = tuple(LayerWeights(layer.tensors) for layer in layers)
    everything = tuple(layer.all_on_device() for layer in layers)
    if _max_device_bytes(everything) <= device_bytes:
        return everything
    minimum = _max_device_bytes(nothing)
    if minimum > device_bytes:
        smallest = min_device_bytes(layers)
        raise BudgetExceeded("streaming to the GPU", minimum, device_bytes, smallest, ledger=VRAM)

    def placement(plan: Placement) -> Layers:
        return tuple(LayerWeights(x.tensors, on_device=x.resident) for x in plan.layers)

    # Unknown to `plan_placement`: memory comes in granules, and splits take a little more.
    slack = (N_DEVICE_SLOTS + 1) * DEVICE_GRANULE_BYTES
    result = _largest(
        nothing, N_DEVICE_SLOTS, device_bytes - slack, device_bytes, placement, _max_device_bytes
    )
    return result or nothing


def min_device_bytes(layers: Sequence[LayerWeights]) -> int:
    """Return enough device memory: for slots alone, or for all layers if that is less."""
    slots_alone = _max_device_bytes([LayerWeights(layer.tensors) for layer in layers])
    return min(slots_alone, whole_device_bytes(layers))


def whole_device_bytes(layers: Sequence[LayerWeights]) -> int:
    """Return the device memory that all layers take."""
    return _max_device_bytes([layer.all_on_device() for layer in layers])


def _max_device_bytes(layers: Sequence[LayerWeights]) -> int:
    """Return the maximum device memory of these layers, for any split of host and storage."""
    resident = Placement(tuple(layers), MIN_N_SLOTS, is_on_device=True).device_resident_bytes
    slots = [layer.slot_bytes + _split_bytes(layer) for layer in layers if layer.streamed]
    return resident + min(N_DEVICE_SLOTS, len(slots)) * device_footprint(max(slots, default=0))


def _split_bytes(layer: LayerWeights) -> int:
    """Return what pinning a part of the layer may add to its slot: the first and last block of each
    tensor, and small tensors, which are read along with their neighbours."""
    small = (min(record.n_bytes, MERGE_GAP_BYTES) for record in layer.streamed)
    return sum(2 * ALIGNMENT + n_bytes for n_bytes in small)


# --- the host ------------------------------------------------------------------------------------


def fill_host(
    layers: Sequence[LayerWeights], host_bytes: int, *, n_slots: int | None = None
) -> Placement:
    """Divide the layers between pinned memory and storage, except for tensors on the device.

    Args:
        layers: in the order of use, with their tensors on the device.
        host_bytes: pinned memory for resident tensors and slots.
        n_slots: pinned slots; None chooses as `plan_placement` does.

    Raises BudgetExceeded if the smallest plan does not fit.
    """
    bare = tuple(layer.with_resident(()) for layer in layers)
    minimum = min_host_bytes(bare, n_slots, is_on_device=True)
    if minimum > host_bytes:
        raise BudgetExceeded("streaming the weights", minimum, host_bytes, minimum)
    everything = Placement(pin_all(bare), is_on_device=True)
    if everything.host_bytes <= host_bytes:
        return everything
    off_device = [LayerWeights(layer.streamed) for layer in bare if layer.streamed]

    def placement(plan: Placement) -> Placement:
        pinned = iter(plan.layers)
        filled = (x.with_resident(next(pinned).resident) if x.streamed else x for x in bare)
        return Placement(tuple(filled), plan.n_slots, is_on_device=True)

    # Each layer's pinned tensors have a buffer of their own, rounded up.
    slack = (ALIGNMENT + PAGE_BYTES) * len(off_device)
    result = _largest(
        off_device, n_slots, host_bytes - slack, host_bytes, placement, lambda x: x.host_bytes
    )
    return result or Placement(bare, n_slots or MIN_N_SLOTS, is_on_device=True)


def _largest(
    layers: Sequence[LayerWeights],
    n_slots: int | None,
    available_bytes: int,
    max_bytes: int,
    placement: Callable[[Placement], PlacedT],
    bytes_of: Callable[[PlacedT], int],
) -> PlacedT | None:
    """Return the plan for `available_bytes`, or for so much less that its `placement` takes at most
    `max_bytes` of memory; None if there is no such plan."""
    while available_bytes > 0:
        try:
            plan = plan_placement(layers, available_bytes, n_slots=n_slots)
        except BudgetExceeded:
            return None
        result = placement(plan)
        excess = bytes_of(result) - max_bytes
        if excess <= 0:
            return result
        available_bytes -= excess
    return None
