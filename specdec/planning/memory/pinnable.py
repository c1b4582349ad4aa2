"""Prediction of the layers that a run can pin in unused memory while it decodes.

`specdec.policy.opportunistic_layers` pins layers in memory that it finds unused. A plan knows most
of that memory: what it reserves for the widest pass and the longest context, and the size of the
sequence that its speeds assume.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from backends.contract.source import ModelSource
from offload.placement.placement import Placement
from offload.placement.plan import pin_layers_of
from offload.units import MIB
from specdec.planning.memory.parts import DRAFTING_PARTS
from specdec.policy.opportunistic_layers import RESERVE_BYTES, activation_bytes_per_token
from specdec.run_options import RunOptions

SEQUENCE_TOKENS = 512
"""Length of the sequence that a plan's speeds assume, prompt included, if the context allows it."""
IN_USE_BYTES = 64 * MIB
"""Share of headroom and activations that passes of a few tokens use: 47 to 63 MiB were measured
without a draft, and 10 to 40 more with one (docs/benchmarks.md)."""


@dataclass(frozen=True)
class PinnableMemory:
    """Memory of a plan that can pin streamed layers while less is in use than was reserved."""

    max_bytes: int = 0
    """Upper bound of bytes usable for layers (empty KV cache, no tokens)."""
    kv_tokens: int = 0
    """Maximum number of tokens of all sequences together."""
    kv_token_bytes: int = 0
    activation_token_bytes: int = 0
    """Activation bytes per token by which a pass narrower than the widest leaves memory unused."""
    slot_bytes: int = 0
    """Memory of one pinned layer."""

    def with_pinned_layers(
        self, placement: Placement, num_cached_tokens: int, num_step_tokens: int
    ) -> Placement:
        """Return the placement with pinned layers, in steps of `num_step_tokens`."""
        if not self.slot_bytes:
            return placement
        n_kv_bytes = min(num_cached_tokens, self.kv_tokens) * self.kv_token_bytes
        n_bytes = self.max_bytes - n_kv_bytes + num_step_tokens * self.activation_token_bytes
        return pin_layers_of(placement, max(0, n_bytes) // self.slot_bytes)


def estimate_pinnable(
    parts: Mapping[str, int],
    source: ModelSource,
    placement: Placement,
    options: RunOptions,
    kv_tokens: int,
    n_drafted: int,
) -> PinnableMemory:
    """Return the pinnable memory of a target; none on a GPU or where no layer streams.

    parts: bytes of the budget's parts, by name.
    kv_tokens: capacity of its KV cache.
    """
    if placement.is_on_device or not placement.n_slots:
        return PinnableMemory()
    num_tokens, n_nodes = options.max_target_tokens(n_drafted), options.target_nodes(n_drafted)
    kv_bytes = source.kv_bytes(kv_tokens, n_nodes) - source.kv_bytes(1, n_nodes)
    token_bytes = kv_bytes // max(1, kv_tokens - 1)
    activations = parts["target activations"]
    activation_token_bytes = int(activation_bytes_per_token(activations, num_tokens))
    unused = parts["available"] + parts["headroom"] + activations + parts["target KV cache"]
    reserved_bytes = num_tokens * activation_token_bytes + n_nodes * token_bytes
    reserved_bytes += sum(parts.get(name, 0) for name in DRAFTING_PARTS)
    max_bytes = unused - IN_USE_BYTES - reserved_bytes - RESERVE_BYTES
    kv_tokens = min(kv_tokens, parts["target KV cache"] // max(1, token_bytes))
    return PinnableMemory(
        max_bytes, kv_tokens, token_bytes, activation_token_bytes, source.slot_bytes(placement)
    )
