"""Divides a memory budget between two models.

The budget is the whole process's. From it come off, in this order: what the process takes already
(measured), headroom for what libraries allocate, the embeddings, heads, KV caches and activations
of both models. What is left holds layers. The draft's come first, because drafting reads them once
for every level of a tree; what of them does not fit streams. The target gets the rest: a ring of
slots through which its layers stream, and as many pinned tensors as fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.source import ModelSource
from offload.budget import BudgetExceeded, MemoryBudget, format_up
from offload.memory import process_memory
from offload.plan import DEFAULT_N_SLOTS, ResidencyPlan, plan_residency
from offload.units import MIB
from specdec.drafters.model import MAX_BEAMS
from specdec.drafters.window import draft_context_size
from specdec.options import RunOptions

DEFAULT_CTX_SIZE = 2048
HEADROOM_BYTES = 192 * MIB
"""Scratch of matrix products, thread stacks, allocator slack: docs/memory.md."""
_SMALLEST_STEP_BYTES = 16 * MIB
"""The smallest budget leaves as much over, and is rounded up to it: the base varies a little."""
_LEAST_ADVISED_CTX = 256
_RUNS_PER_NODE = 4
_PROBABILITY_BYTES = 8  # float64
_RANKED_LOGIT_BYTES = 4 + 8  # float32 and int64
_PLENTY_BYTES = 1 << 62


@dataclass(frozen=True)
class Division:
    """How the memory is divided."""

    budget: MemoryBudget
    target: ResidencyPlan
    draft: ResidencyPlan | None
    ctx_size: int
    n_drafted: int
    """Draft tokens of the largest tree that there is room for."""
    smallest_bytes: int
    """The smallest budget that works."""


@dataclass(frozen=True)
class _Tenant:
    """A model that wants memory for its layers."""

    source: ModelSource
    load_mode: str
    n_slots: int | None

    @property
    def overhead_bytes(self) -> int:
        """What streaming takes beside the ring."""
        return self.source.streaming_overhead_bytes(self.n_slots or DEFAULT_N_SLOTS)

    @property
    def least_bytes(self) -> int:
        """Enough to run: all streamed, or all resident where that is less or asked for."""
        if self.load_mode == "mmap":
            return 0
        everything = plan_residency(self.source.layers, _PLENTY_BYTES, n_slots=self.n_slots)
        if self.load_mode == "ram":
            return everything.total_bytes
        return min(everything.total_bytes, everything.smallest_bytes + self.overhead_bytes)

    def place(self, available_bytes: int) -> ResidencyPlan:
        """The layers' places within so much memory, which is at least `least_bytes`."""
        everything = plan_residency(self.source.layers, _PLENTY_BYTES, n_slots=self.n_slots)
        if self.load_mode in ("mmap", "ram") or everything.total_bytes <= available_bytes:
            return everything
        left = available_bytes - self.overhead_bytes
        return plan_residency(self.source.layers, left, n_slots=self.n_slots)

    def reserve(self, budget: MemoryBudget, plan: ResidencyPlan, prefix: str) -> None:
        if self.load_mode == "mmap":
            return
        budget.reserve(f"{prefix}pinned layers", plan.resident_bytes)
        budget.reserve(f"{prefix}ring", plan.ring_bytes)
        if plan.n_slots:
            budget.reserve(f"{prefix}paging", self.overhead_bytes)


def most_draft_nodes(n_drafted: int, most_leaves: int | None) -> int:
    """Most nodes that the draft runs for one tree of the target, of which it keeps the KV.

    A tree of the best n nodes takes about 2n runs to find, 5n at most of those observed.
    """
    n_nodes = _RUNS_PER_NODE * max(MAX_BEAMS, 1 + n_drafted)
    return n_nodes if most_leaves is None else min(n_nodes, most_leaves)


class Divider:
    """Divides budgets for one pair of models and one set of options."""

    def __init__(self, target: ModelSource, draft: ModelSource | None, options: RunOptions) -> None:
        self._options = options
        self._target = _Tenant(target, options.load_mode, options.prefetch_depth)
        self._draft = None if draft is None else _Tenant(draft, "auto", None)
        self._ctx_size = min(options.ctx_size or DEFAULT_CTX_SIZE, target.max_context)
        self._n_drafted = 0
        self._base_bytes = process_memory().rss_bytes

    def divide(self, total_bytes: int, n_drafted: int) -> Division:
        """Reserve every part by name, for trees of `n_drafted` tokens.

        Raises BudgetExceeded with the smallest budget that works.
        """
        self._n_drafted = n_drafted
        parts = self._parts(self._ctx_size)
        needed = self._needed(parts)
        smallest = (-(-needed // _SMALLEST_STEP_BYTES) + 1) * _SMALLEST_STEP_BYTES
        if needed > total_bytes:
            advice = self._advice(needed)
            raise BudgetExceeded("this run", needed, total_bytes, smallest, advice)
        budget = MemoryBudget(total_bytes, self._base_bytes, HEADROOM_BYTES)
        for name, n_bytes in parts.items():
            budget.reserve(name, n_bytes)
        draft = None
        if self._draft is not None:
            draft = self._draft.place(budget.available_bytes - self._target.least_bytes)
            self._draft.reserve(budget, draft, "draft ")
        target = self._target.place(budget.available_bytes)
        self._target.reserve(budget, target, "")
        return Division(budget, target, draft, self._ctx_size, n_drafted, smallest)

    def _needed(self, parts: dict[str, int]) -> int:
        least = self._target.least_bytes + (self._draft.least_bytes if self._draft else 0)
        return self._base_bytes + HEADROOM_BYTES + sum(parts.values()) + least

    def _parts(self, ctx_size: int, cache_type: str | None = None) -> dict[str, int]:
        """Bytes of everything but the layers, by name."""
        target, n_nodes = self._target.source, 1 + self._n_drafted
        parts = {
            "target embeddings and head": target.outer_bytes,
            "target KV cache": target.kv_bytes(ctx_size, n_nodes, cache_type),
            "target activations": target.scratch_bytes(ctx_size, n_nodes, n_nodes),
        }
        if self._draft is not None:
            draft = self._draft.source
            parts["draft embeddings and head"] = draft.outer_bytes
            n_run = most_draft_nodes(self._n_drafted, draft.max_tree_leaves)
            window = self._options.spec.draft_window
            draft_ctx = draft_context_size(window, ctx_size, draft.max_context, n_run)
            parts["draft KV cache"] = draft.kv_bytes(draft_ctx, n_run)
            parts["draft activations"] = draft.scratch_bytes(draft_ctx, MAX_BEAMS, n_run)
            parts["draft probabilities"] = self._probability_bytes(draft)
        return parts

    def _probability_bytes(self, draft: ModelSource) -> int:
        """What drafting keeps beside the draft's logits.

        The rejection rule keeps the row that each token of its chain was drawn from. A tree's
        level is ranked on a copy of its logits, whose order is one int64 for each.
        """
        spec, n_tokens = self._options.spec, min(draft.vocab_size, self._target.source.vocab_size)
        if spec.acceptance == "rejection":
            return min(self._n_drafted, spec.depth) * n_tokens * _PROBABILITY_BYTES
        return MAX_BEAMS * n_tokens * _RANKED_LOGIT_BYTES

    def _advice(self, needed: int) -> str:
        """Which smaller context or KV format would help, and by how much."""
        found = []
        half = self._ctx_size // 2
        if half >= _LEAST_ADVISED_CTX:
            found.append((self._needed(self._parts(half)), f"--ctx-size {half}"))
        for cache_type in self._target.source.smaller_cache_types:
            changed = self._needed(self._parts(self._ctx_size, cache_type))
            flags = f"--cache-type-k {cache_type} --cache-type-v {cache_type}"
            found.append((changed, flags))
        worth = [(n, flags) for n, flags in found if needed - n >= _SMALLEST_STEP_BYTES]
        return "".join(f"; with {flags} it is {format_up(n)}" for n, flags in worth)
