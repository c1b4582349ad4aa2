"""Placement of tensors in memory, and the number of slots of the ring.

Layers are read in a cycle, the worst case of every cache that keeps what was used last; a fixed
pinned set saves exactly its share of the reads. With B bytes for weights, L layers and W slots,
pinning a whole layer costs its size and saves its size per pass; pinning the same tensor (a *role*,
such as the down projection) in all layers also shrinks every slot, so the same memory saves
L / (L - W) as much. Hence the order: roles in all layers, then whole layers spread evenly among the
others (their compute hides the next one's read), then single tensors with the memory left.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from offload.budget import BudgetExceeded
from offload.formats.tensors import TensorRecord
from offload.placement.placement import LayerWeights, Placement
from offload.storage.aligned import align_down, align_up, buffer_bytes

DEFAULT_N_SLOTS = 3
MIN_N_SLOTS = 2
_MAX_ROLES = 10  # all subsets are tried; a decoder layer has about seven large tensors
_MIN_ROLE_SHARE = 0.01  # of a layer: smaller tensors (norms, biases) are not worth a subset
_MAX_CANDIDATES = 64  # number laid out exactly, the best estimate first, until one fits
_PAYS_FOR_A_SLOT = 0.9  # two slots instead of three must save a tenth of the reads


def plan_placement(
    layers: Sequence[LayerWeights], available_bytes: int, *, n_slots: int | None = None
) -> Placement:
    """Choose the resident set that leaves the fewest bytes to read per pass, on the CPU.

    Args:
        layers: in the order of use; their present resident sets are ignored.
        available_bytes: memory for resident tensors and ring together.
        n_slots: depth of the ring; None chooses 3, or 2 where that saves a tenth of the reads.

    Raises:
        BudgetExceeded: not even the smallest plan fits (all streamed, two slots).
    """
    if n_slots is not None and n_slots < 1:
        raise ValueError(f"the ring needs at least one slot, not {n_slots}")
    bare = tuple(LayerWeights(layer.tensors) for layer in layers)
    everything = Placement(pin_all(bare))
    if everything.host_bytes <= available_bytes:
        return everything
    chosen = _fill(bare, n_slots or DEFAULT_N_SLOTS, available_bytes)
    if n_slots is None and (chosen is None or _may_save_a_tenth(chosen)):
        # The deeper ring evens out storage and compute, which is worth some bytes but not many.
        plan = _fill(bare, MIN_N_SLOTS, available_bytes)
        if plan and (not chosen or plan.streamed_bytes < _PAYS_FOR_A_SLOT * chosen.streamed_bytes):
            chosen = plan
    if chosen is None:
        minimum = min_host_bytes(bare, n_slots)
        raise BudgetExceeded("streaming the weights", minimum, available_bytes, minimum)
    return chosen


def pin_all(layers: Sequence[LayerWeights]) -> tuple[LayerWeights, ...]:
    """Return the layers with everything that is not on a device in host memory."""
    return tuple(
        layer.with_resident(frozenset(r.name for r in layer.tensors) - layer.on_device)
        for layer in layers
    )


def min_host_bytes(
    layers: Sequence[LayerWeights], n_slots: int | None, *, is_on_device: bool = False
) -> int:
    """Return enough host memory: for slots alone, or for all tensors if that is less.

    Args:
        layers: with the tensors on the device, and no other placement.
        n_slots: depth of the ring; None: two.
    """
    streamed = Placement(tuple(layers), n_slots or MIN_N_SLOTS, is_on_device)
    return min(streamed.host_bytes, Placement(pin_all(layers), 0, is_on_device).host_bytes)


# --- filling the memory ------------------------------------------------------------------------


def _fill(bare: tuple[LayerWeights, ...], n_slots: int, available_bytes: int) -> Placement | None:
    """Return the best plan with this ring; None if the ring alone does not fit."""
    plan = Placement(bare, n_slots)
    if plan.host_bytes > available_bytes:
        return None
    candidates = (
        Placement(_pin(bare, roles, n_whole), n_slots)
        for roles, n_whole in _candidates(bare, n_slots, available_bytes)
    )
    fitting = (result for result in candidates if result.host_bytes <= available_bytes)
    return _pin_single_tensors(next(fitting, plan), available_bytes)


def _may_save_a_tenth(plan: Placement) -> bool:
    """Return whether one slot less might save a tenth of the reads: a byte saves a few at most."""
    return MIN_N_SLOTS * plan.slot_bytes > (1 - _PAYS_FOR_A_SLOT) * plan.streamed_bytes


def _candidates(
    bare: tuple[LayerWeights, ...], n_slots: int, available_bytes: int
) -> Iterator[tuple[frozenset[str], int]]:
    """Yield (roles pinned in all layers, whole layers pinned), fewest streamed bytes first.

    The sizes are estimates without rounding and for layers of the same size; a plan is laid out
    exactly before it is taken.
    """
    roles, sizes = _role_sizes(bare)
    layer_bytes = np.array([layer.n_bytes for layer in bare], dtype=np.float64)
    result: list[tuple[float, int, int, int]] = []
    for subset in range(2 ** len(roles)):
        mask = np.array([subset >> bit & 1 for bit in range(len(roles))], dtype=np.float64)
        rest = layer_bytes - sizes @ mask  # [layers] bytes
        left = available_bytes - (layer_bytes - rest).sum() - n_slots * rest.max()
        if left < 0 or not rest.any():
            continue
        n_whole = min(int(left / rest.mean()), len(bare) - 1)
        for fewer in range(min(n_whole, 2) + 1):  # the estimate may be a layer too good
            unused = left - (n_whole - fewer) * rest.mean()
            # Single tensors will use a part of what is left: count half of it.
            streamed = rest.sum() - left + unused / 2
            result.append((float(streamed), int(mask.sum()), subset, n_whole - fewer))
    for _, _, subset, n_whole in sorted(result)[:_MAX_CANDIDATES]:
        yield frozenset(r for bit, r in enumerate(roles) if subset >> bit & 1), n_whole


def _role(record: TensorRecord) -> str:
    """Return the name without its first number, the layer's: "model.layers.#.mlp.up_proj"."""
    return re.sub(r"\d+", "#", record.name, count=1)


def _role_sizes(layers: tuple[LayerWeights, ...]) -> tuple[list[str], np.ndarray]:
    """Return the large roles, largest first, and their bytes [layers, roles]."""
    totals: dict[str, int] = {}
    for layer in layers:
        for record in layer.tensors:
            totals[_role(record)] = totals.get(_role(record), 0) + record.n_bytes
    minimum = _MIN_ROLE_SHARE * sum(totals.values())
    roles = sorted((r for r in totals if totals[r] > minimum), key=lambda r: (-totals[r], r))
    roles = roles[:_MAX_ROLES]
    sizes = np.zeros((len(layers), len(roles)))
    for row, layer in enumerate(layers):
        for record in layer.tensors:
            if _role(record) in roles:
                sizes[row, roles.index(_role(record))] += record.n_bytes
    return roles, sizes


def _pin(
    bare: tuple[LayerWeights, ...], roles: frozenset[str], n_whole: int
) -> tuple[LayerWeights, ...]:
    whole = set(spread(n_whole, len(bare)))
    return tuple(
        layer.with_resident(
            frozenset(r.name for r in layer.tensors if index in whole or _role(r) in roles)
        )
        for index, layer in enumerate(bare)
    )


def spread(n_chosen: int, n_layers: int) -> list[int]:
    """Return `n_chosen` of `n_layers` indices, ascending and as evenly spaced as possible."""
    return [(2 * k + 1) * n_layers // (2 * n_chosen) for k in range(n_chosen)]


def pin_layers_of(placement: Placement, n_layers: int) -> Placement:
    """Return the placement while a ring has pinned `n_layers` of its streamed layers, or as many as
    may be, in memory beside it (offload.ring.order)."""
    streamed = [i for i, layer in enumerate(placement.layers) if layer.slot_bytes]
    num_pinned = min(n_layers, len(streamed) - placement.n_slots)
    pinned = {streamed[k] for k in spread(num_pinned, len(streamed))}
    layers = list(placement.layers)
    for i in pinned:
        layers[i] = layers[i].with_resident(record.name for record in layers[i].tensors)
    return replace(placement, layers=tuple(layers))


def _pin_single_tensors(plan: Placement, available_bytes: int) -> Placement:
    """Pin further tensors, the largest first, one per layer in turn, while they fit.

    Each is counted with the blocks it touches, an upper bound, because neighbours share blocks.
    """
    layers = list(plan.layers)
    slots = [layer.slot_bytes for layer in layers]
    resident_bytes = plan.resident_bytes
    candidates = ((r, i) for i, layer in enumerate(layers) for r in layer.streamed)
    for record, index in sorted(candidates, key=lambda pair: -pair[0].n_bytes):
        end = align_up(record.offset + record.n_bytes)
        grown_bytes = resident_bytes + end - align_down(record.offset)
        if buffer_bytes(grown_bytes) + plan.ring_bytes > available_bytes:
            continue
        trial = layers[index].with_resident(layers[index].resident | {record.name})
        if trial.slot_bytes < slots[index]:  # not so where it is read along as a gap
            layers[index], slots[index] = trial, trial.slot_bytes
            resident_bytes = grown_bytes
    return Placement(tuple(layers), plan.n_slots)
