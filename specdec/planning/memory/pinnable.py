"""What a run is going to lend to layers while it decodes, foreseen before anything is loaded.

`specdec.policy.opportunistic_layers` lends what it finds unused. A plan knows most of that: what it sets
aside for the widest pass and the longest context, and how large the text is that it speaks of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from backends.contract.source import ModelSource
from offload.placement.placement import Placement
from offload.placement.plan import pin_layers_of
from offload.units import MIB
from specdec.planning.memory.parts import DRAFTING_PARTS
from specdec.policy.opportunistic_layers import RESERVE_BYTES, bytes_per_row
from specdec.run_options import RunOptions

TEXT_TOKENS = 512
"""Of a text that a plan's speeds are about, prompt included, where the context has room for it."""
IN_USE_BYTES = 64 * MIB
"""Of the headroom and of the activations, what passes of a few rows take: 47 to 63 MiB were
measured without a draft, and 10 to 40 more with one (docs/benchmarks.md)."""


@dataclass(frozen=True)
class PinnableMemory:
    """What memory of a division holds layers that stream, while less is in use than was planned."""

    max_bytes: int = 0
    """Lent beside an empty KV cache, before passes of no rows."""
    kv_tokens: int = 0
    """Of all sequences together, at most."""
    kv_token_bytes: int = 0
    row_bytes: int = 0
    """Of activations, which a pass that is narrower than the widest one leaves for that."""
    slot_bytes: int = 0
    """Memory of one layer that is held."""

    def pin_layers(self, placement: Placement, n_tokens: int, num_tokens: int) -> Placement:
        """The target's layers while all sequences have so many tokens, and passes so many rows."""
        if not self.slot_bytes:
            return placement
        n_kv_bytes = min(n_tokens, self.kv_tokens) * self.kv_token_bytes
        n_bytes = self.max_bytes - n_kv_bytes + num_tokens * self.row_bytes
        return pin_layers_of(placement, max(0, n_bytes) // self.slot_bytes)


def foresee(
    parts: Mapping[str, int],
    source: ModelSource,
    placement: Placement,
    options: RunOptions,
    ctx_size: int,
    n_drafted: int,
) -> PinnableMemory:
    """Of a target; nothing of what a GPU computes, nor where all stays.

    parts: of the budget, by name.
    """
    if placement.is_on_device or not placement.n_slots:
        return PinnableMemory()
    num_tokens, n_nodes = options.max_target_tokens(n_drafted), options.target_nodes(n_drafted)
    n_tokens = options.all_tokens(ctx_size)
    kv_bytes = source.kv_bytes(n_tokens, n_nodes) - source.kv_bytes(1, n_nodes)
    token_bytes = kv_bytes // max(1, n_tokens - 1)
    activations = parts["target activations"]
    row_bytes = int(bytes_per_row(activations, num_tokens))
    unused = parts["available"] + parts["headroom"] + activations + parts["target KV cache"]
    to_come = num_tokens * row_bytes + n_nodes * token_bytes
    to_come += sum(parts.get(name, 0) for name in DRAFTING_PARTS)
    max_bytes = unused - IN_USE_BYTES - to_come - RESERVE_BYTES
    return PinnableMemory(max_bytes, n_tokens, token_bytes, row_bytes, source.slot_bytes(placement))
