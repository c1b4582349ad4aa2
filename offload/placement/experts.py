"""The routed experts of a mixture, and the memory that a cache of them takes. Arithmetic only.

Every layer of a mixture has experts that a router chooses among, a few for each token. They are not
part of what streams in every pass: a pass asks for those that its tokens were routed to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from offload.formats.tensors import TensorRecord
from offload.storage.aligned import buffer_bytes
from offload.storage.layout import MERGE_GAP_BYTES, Layout, make_layout

_REUSE = 0.7
"""n consecutive tokens are routed to about n ** 0.7 times the experts of one: replays of published
traces of Qwen3-30B and gpt-oss-120b have 1.6 to 1.8 for 2, 3.9 to 5.0 for 8, 7 to 12 for 32."""
_MISSES = 0.93
"""n tokens miss about n ** 0.93 times the experts that one does: neighbours share mostly cached
ones. Replays of the embedded mixture have n ** 0.85 to n ** 1.01 with 17 to 60 % cached."""
ASSUMED_DECAY = 5.5
"""With a share s of all experts cached, about exp(-5.5 s) of those asked for are missed. Published
for Qwen3-30B: 47 % with 11 % cached and 24 % with 23 %, where this predicts 53 and 28; the embedded
mixture, grown, has 4.7 to 7.1 at 5 to 49 % cached, with sequences of several lengths. Least squares
over all these give 5.48; two of twenty are off by more than 20 %. gpt-oss-120b would need 12."""


@dataclass(frozen=True)
class LayerExperts:
    """The experts of one layer: the tensors of each, in the order in which they are used.

    n_used: experts that a token is routed to.
    is_at_once: whether all experts that a pass uses in a layer must be in memory at once.
    """

    tensors: tuple[tuple[TensorRecord, ...], ...]
    n_used: int
    is_at_once: bool = False

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """Layout of each expert's tensors in a slot; neighbours in the file are one read."""
        gap = 0 if self.is_at_once else MERGE_GAP_BYTES  # if at once, other experts are in gaps
        return tuple(make_layout(tensors, merge_gap=gap) for tensors in self.tensors)

    @cached_property
    def slot_bytes(self) -> int:
        return max(layout.n_bytes for layout in self.layouts)

    @cached_property
    def n_bytes(self) -> int:
        return sum(record.n_bytes for tensors in self.tensors for record in tensors)

    def used_bytes(self, num_tokens: int) -> float:
        """Return the bytes of weights that so many tokens are likely to be multiplied with."""
        return self.n_hit(num_tokens) * self.n_bytes / len(self.tensors)

    def rows_each(self, num_tokens: int) -> int:
        """Return the tokens of one expert, among those that `num_tokens` are routed to."""
        return max(1, round(num_tokens * self.n_used / self.n_hit(num_tokens)))

    def n_hit(self, num_tokens: int) -> float:
        """Return the number of different experts that so many tokens are likely routed to."""
        return likely_hit(len(self.tensors), self.n_used, num_tokens)


@dataclass(frozen=True)
class ExpertCachePlan:
    """A cache of experts of one model: slots of one size, and its expected hit rate."""

    layers: tuple[LayerExperts | None, ...]
    """Experts of each layer; None for a layer without any."""
    n_slots: int
    decay: float = ASSUMED_DECAY
    """Decay of misses with the share cached: exp(-decay * share) of those asked for are missed."""

    @cached_property
    def slot_bytes(self) -> int:
        return slot_bytes(self.layers)

    @cached_property
    def n_experts(self) -> int:
        return count_experts(self.layers)

    @property
    def n_bytes(self) -> int:
        """Memory of all slots."""
        return self.n_slots * self.slot_bytes

    @property
    def holds_all(self) -> bool:
        return self.n_slots >= self.n_experts

    @cached_property
    def hit_rate(self) -> float:
        """Expected share of the experts asked for that are in memory."""
        return likely_hit_rate(self.n_slots / self.n_experts, self.decay)

    def read_bytes(self, layer: int, num_tokens: int) -> float:
        """Return the expected reads of a pass of `num_tokens` tokens."""
        experts = self.layers[layer]
        if experts is None:
            return 0.0
        missed = num_tokens**_MISSES * experts.used_bytes(1) * (1.0 - self.hit_rate)
        return min(experts.used_bytes(num_tokens), missed)

    @property
    def bytes_per_token(self) -> float:
        """Expected reads of a pass of one token."""
        return sum(self.read_bytes(i, 1) for i in range(len(self.layers)))


def likely_hit(n_experts: int, n_used: int, num_tokens: int) -> float:
    """Return the number of a layer's experts that so many tokens are likely routed to."""
    return min(float(n_experts), n_used * num_tokens**_REUSE)


def likely_hit_rate(share: float, decay: float = ASSUMED_DECAY) -> float:
    """Return the likely hit rate of a cache of this share of all experts."""
    return 1.0 if share >= 1 else 1.0 - math.exp(-decay * share)


def slot_bytes(layers: Sequence[LayerExperts | None]) -> int:
    """Return the memory of one slot, which fits any expert."""
    return buffer_bytes(max((x.slot_bytes for x in layers if x is not None), default=0))


def count_experts(layers: Sequence[LayerExperts | None]) -> int:
    return sum(len(x.tensors) for x in layers if x is not None)


def min_slots(layers: Sequence[LayerExperts | None]) -> int:
    """Return the slots below which a pass cannot run, or nothing would ever be found: the largest
    layer's experts, all of them if they are used at once, else those of a token."""
    counts = (len(x.tensors) if x.is_at_once else x.n_used for x in layers if x is not None)
    return max(counts, default=0)
