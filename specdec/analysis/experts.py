"""How often a mixture's experts are in memory, and what a token reads of them: by memory.

Every pass needs the rest of the model: that goes first, with what the process takes beside it, and
the experts have what is left, in slots of the size of the largest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from backends.shapes.shape import ModelShape
from offload.placement.experts import likely_hit_rate

_SHARES = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Of all experts: for the table."""


@dataclass(frozen=True)
class ExpertCache:
    """What a device's memory does for a mixture, as estimated for any; a plan knows more, once the
    model has run."""

    memory_bytes: int
    """Of the device."""
    n_bytes: int
    """Of all experts."""
    stored_bytes: int
    """Memory that experts have."""
    hit_rate: float
    """Likely share of the experts asked for that are in memory."""
    bytes_per_token: float
    """That a pass of one token is likely to read of them."""


def expert_cache(model: ModelShape, context: int, memory_bytes: int) -> ExpertCache:
    expert_cache = memory_bytes - _other_bytes(model, context)
    n_slots = max(0, min(model.n_experts_in_all, int(expert_cache / model.largest_expert_bytes)))
    hit_rate = likely_hit_rate(n_slots / model.n_experts_in_all)
    missed = model.read_expert_bytes(1) * (1 - hit_rate)
    stored = min(model.expert_bytes, int(n_slots * model.largest_expert_bytes))
    return ExpertCache(memory_bytes, model.expert_bytes, stored, hit_rate, missed)


def by_memory(model: ModelShape, context: int) -> tuple[ExpertCache, ...]:
    """Of memory for some shares of the experts."""
    rest = _other_bytes(model, context)
    all_bytes = model.n_experts_in_all * model.largest_expert_bytes
    sizes = (rest + math.ceil(share * all_bytes) for share in _SHARES)
    return tuple(expert_cache(model, context, n_bytes) for n_bytes in sizes)


def _other_bytes(model: ModelShape, context: int) -> int:
    dense_bytes = model.layer_bytes - model.expert_bytes
    kv_bytes = context * model.kv_bytes_per_token
    return model.process_bytes + model.non_layer_bytes + kv_bytes + dense_bytes
