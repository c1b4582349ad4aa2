"""Expert hit rate of a mixture and expert bytes read per token, by memory.

Every pass needs the dense weights: they and the process's own memory are subtracted first, and the
experts get the remainder, in slots of the size of the largest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from backends.shapes.shape import ModelShape
from offload.placement.experts import likely_hit_rate

_SHARES = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Shares of all experts that the table shows."""


@dataclass(frozen=True)
class ExpertCache:
    """Estimated expert cache of a mixture in a device's memory; a plan is more accurate, once the
    model has run."""

    memory_bytes: int
    """Memory of the device."""
    n_bytes: int
    """Size of all experts."""
    stored_bytes: int
    """Memory available for experts."""
    hit_rate: float
    """Expected share of the accessed experts that are in memory."""
    bytes_per_token: float
    """Expected bytes of experts read by a pass of one token."""


def expert_cache(model: ModelShape, context: int, memory_bytes: int) -> ExpertCache:
    available = memory_bytes - _other_bytes(model, context)
    n_slots = max(0, min(model.n_experts_in_all, int(available / model.largest_expert_bytes)))
    hit_rate = likely_hit_rate(n_slots / model.n_experts_in_all)
    missed = model.read_expert_bytes(1) * (1 - hit_rate)
    stored = min(model.expert_bytes, int(n_slots * model.largest_expert_bytes))
    return ExpertCache(memory_bytes, model.expert_bytes, stored, hit_rate, missed)


def by_memory(model: ModelShape, context: int) -> tuple[ExpertCache, ...]:
    """Return the estimates for memory that holds some shares of the experts."""
    other_bytes = _other_bytes(model, context)
    all_bytes = model.n_experts_in_all * model.largest_expert_bytes
    sizes = (other_bytes + math.ceil(share * all_bytes) for share in _SHARES)
    return tuple(expert_cache(model, context, n_bytes) for n_bytes in sizes)


def _other_bytes(model: ModelShape, context: int) -> int:
    dense_bytes = model.layer_bytes - model.expert_bytes
    kv_bytes = model.sequence_bytes(context)
    return model.process_bytes + model.non_layer_bytes + kv_bytes + dense_bytes
