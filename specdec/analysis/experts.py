"""How often a mixture's experts are in memory, and what a token reads of them: by memory.

Every pass needs the rest of the model: that goes first, and the experts have what is left.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.shapes.shape import ModelShape
from offload.residency.experts import likely_hit_rate

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
    held_bytes: int
    """Memory that experts have."""
    hit_rate: float
    """Likely share of the experts asked for that are in memory."""
    bytes_per_token: float
    """That a pass of one token is likely to read of them."""


def expert_cache(model: ModelShape, context: int, memory_bytes: int) -> ExpertCache:
    held = max(0, min(model.expert_bytes, memory_bytes - _other_bytes(model, context)))
    hit_rate = likely_hit_rate(held / model.expert_bytes)
    missed = model.read_expert_bytes(1) * (1 - hit_rate)
    return ExpertCache(memory_bytes, model.expert_bytes, held, hit_rate, missed)


def by_memory(model: ModelShape, context: int) -> tuple[ExpertCache, ...]:
    """Of memory for some shares of the experts."""
    others = _other_bytes(model, context)
    sizes = (others + int(share * model.expert_bytes) for share in _SHARES)
    return tuple(expert_cache(model, context, n_bytes) for n_bytes in sizes)


def _other_bytes(model: ModelShape, context: int) -> int:
    dense_bytes = model.layer_bytes - model.expert_bytes
    return model.outer_bytes + context * model.kv_bytes_per_token + dense_bytes
