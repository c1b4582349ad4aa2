"""Divides a memory budget between two models.

The budget is the whole process's. From it come off, in this order: what the process takes already
(measured), headroom for what libraries allocate, the embeddings, heads, KV caches and activations
of both models. What is left holds layers. The draft's come first, because drafting reads them once
for every level of a tree; what of them does not fit, or is not wanted in memory, streams. The
target gets the rest: a ring of slots through which its layers stream, and as many pinned tensors as
fit. How much goes to each is a `Shape`, and `specdec.alternatives` chooses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from backends.source import ModelSource
from offload.budget import BudgetExceeded, MemoryBudget, format_up
from offload.memory import process_memory
from offload.plan import DEFAULT_N_SLOTS, ResidencyPlan, plan_residency
from offload.units import MIB
from specdec.drafters.candidates import MAX_NOISE_POSITIONS
from specdec.drafters.model import MAX_BEAMS
from specdec.drafters.window import draft_context_size
from specdec.options import RunOptions

DEFAULT_CTX_SIZE = 2048
HEADROOM_BYTES = 192 * MIB
"""Scratch of matrix products, thread stacks, allocator slack: docs/memory.md."""
SMALL_TREE = 8
"""Draft tokens that every automatic plan has room for."""
_SMALLEST_STEP_BYTES = 16 * MIB
"""The smallest budget leaves as much over, and is rounded up to it: the base varies a little."""
_LEAST_ADVISED_CTX = 256
_RUNS_PER_NODE = 6
_PROBABILITY_BYTES = 8  # float64
_RANKED_LOGIT_BYTES = 4 + 8  # float32 and int64
_NOISE_BYTES = 4  # float32
_PLENTY_BYTES = 1 << 62


@dataclass(frozen=True)
class Shape:
    """What divisions of the same memory differ in."""

    n_drafted: int
    """Draft tokens of the largest tree that there is room for."""
    n_slots: int | None = None
    """Of the target's ring; None: 3, or 2 where that saves a tenth of the reads."""
    draft_share: float = 1.0
    """Of the draft's layers that are in memory, where there is room for them."""
    has_draft: bool = True


@dataclass(frozen=True)
class Division:
    """How the memory is divided."""

    budget: MemoryBudget
    target: ResidencyPlan
    draft: ResidencyPlan | None
    ctx_size: int
    shape: Shape
    smallest_bytes: int
    """The smallest budget that works."""

    @property
    def n_drafted(self) -> int:
        """Draft tokens of the largest tree that there is room for."""
        return self.shape.n_drafted


@dataclass(frozen=True)
class _Tenant:
    """A model that wants memory for its layers."""

    source: ModelSource
    load_mode: str
    n_slots: int | None
    """What the user fixed."""

    @cached_property
    def everything(self) -> ResidencyPlan:
        """All layers in memory; knows the least that streaming takes, too."""
        return plan_residency(self.source.layers, _PLENTY_BYTES, n_slots=self.n_slots)

    @cached_property
    def least_bytes(self) -> int:
        """Enough to run: all streamed, or all resident where that is less or asked for."""
        if self.load_mode == "mmap":
            return 0
        if self.load_mode == "ram":
            return self.everything.total_bytes
        streamed = self.everything.smallest_bytes + self.overhead_bytes(self.n_slots)
        return min(self.everything.total_bytes, streamed)

    def overhead_bytes(self, n_slots: int | None) -> int:
        """What streaming takes beside a ring of that depth."""
        return self.source.streaming_overhead_bytes(n_slots or DEFAULT_N_SLOTS)

    def place(self, available_bytes: int, n_slots: int | None = None) -> ResidencyPlan:
        """The layers' places within so much memory, which is at least `least_bytes`.

        Raises BudgetExceeded where a ring of `n_slots` does not fit.
        """
        everything = self.everything
        if self.load_mode in ("mmap", "ram") or everything.total_bytes <= available_bytes:
            return everything
        n_slots = self.n_slots or n_slots
        left = available_bytes - self.overhead_bytes(n_slots)
        return plan_residency(self.source.layers, left, n_slots=n_slots)

    def share_bytes(self, share: float) -> int:
        """Memory for that share of the layers, at least what it takes to run."""
        return max(self.least_bytes, int(share * self.everything.total_bytes))

    def reserve(
        self, budget: MemoryBudget, plan: ResidencyPlan, n_slots: int | None, prefix: str
    ) -> None:
        """Set aside what `place` planned for."""
        if self.load_mode == "mmap":
            return
        budget.reserve(f"{prefix}pinned layers", plan.resident_bytes)
        budget.reserve(f"{prefix}ring", plan.ring_bytes)
        if plan.n_slots:
            budget.reserve(f"{prefix}paging", self.overhead_bytes(self.n_slots or n_slots))


def most_draft_nodes(n_drafted: int, most_leaves: int | None) -> int:
    """Most nodes that the draft runs for one tree of the target, of which it keeps the KV.

    A tree of the best n nodes takes about 2n runs to find, 5n at most of those observed; the rest
    is for drafting ahead.
    """
    n_nodes = _RUNS_PER_NODE * max(MAX_BEAMS, 1 + n_drafted)
    return n_nodes if most_leaves is None else min(n_nodes, most_leaves)


class Divider:
    """Divides budgets for one pair of models and one set of options.

    `base_bytes` is what the process takes already; measured unless given.
    """

    def __init__(
        self,
        target: ModelSource,
        draft: ModelSource | None,
        options: RunOptions,
        base_bytes: int | None = None,
    ) -> None:
        self._options = options
        self._target = _Tenant(target, options.load_mode, options.prefetch_depth)
        self._draft = None if draft is None else _Tenant(draft, "auto", None)
        self._ctx_size = min(options.ctx_size or DEFAULT_CTX_SIZE, target.max_context)
        self._base_bytes = process_memory().rss_bytes if base_bytes is None else base_bytes

    @property
    def draft_layer_bytes(self) -> int:
        """Memory that holds all of the draft's layers; 0 without a draft."""
        return 0 if self._draft is None else self._draft.everything.total_bytes

    @property
    def least_drafted(self) -> int:
        """Draft tokens that every plan has room for: those asked for, or a small tree."""
        spec = self._options.spec
        if not spec.spec_type:
            return 0
        return SMALL_TREE if spec.num_draft_tokens is None else spec.num_draft_tokens

    def divide(self, total_bytes: int, shape: Shape) -> Division:
        """Reserve every part by name.

        Raises BudgetExceeded with the smallest budget that works.
        """
        draft = self._draft if shape.has_draft else None
        parts = self._parts(self._ctx_size, shape.n_drafted, draft)
        needed = self._needed(parts, draft)
        if needed > total_bytes:
            advice = self._advice(needed, shape)
            raise BudgetExceeded("this run", needed, total_bytes, self.smallest_bytes, advice)
        budget = MemoryBudget(total_bytes, self._base_bytes, HEADROOM_BYTES)
        for name, n_bytes in parts.items():
            budget.reserve(name, n_bytes)
        draft_plan = None
        if draft is not None:
            left = budget.available_bytes - self._target.least_bytes
            draft_plan = draft.place(min(left, draft.share_bytes(shape.draft_share)))
            draft.reserve(budget, draft_plan, None, "draft ")
        target_plan = self._target.place(budget.available_bytes, shape.n_slots)
        self._target.reserve(budget, target_plan, shape.n_slots, "")
        return Division(budget, target_plan, draft_plan, self._ctx_size, shape, self.smallest_bytes)

    @cached_property
    def smallest_bytes(self) -> int:
        """The smallest budget that works: with the smallest tree and the least of both models."""
        parts = self._parts(self._ctx_size, self.least_drafted, self._draft)
        needed = self._needed(parts, self._draft)
        return (-(-needed // _SMALLEST_STEP_BYTES) + 1) * _SMALLEST_STEP_BYTES

    def _needed(self, parts: dict[str, int], draft: _Tenant | None) -> int:
        least = self._target.least_bytes + (draft.least_bytes if draft else 0)
        return self._base_bytes + HEADROOM_BYTES + sum(parts.values()) + least

    def _parts(
        self, ctx_size: int, n_drafted: int, draft: _Tenant | None, cache_type: str | None = None
    ) -> dict[str, int]:
        """Bytes of everything but the layers, by name."""
        target = self._target.source
        n_nodes = self._options.target_nodes(n_drafted)
        n_rows = self._options.target_rows(n_drafted)
        parts = {
            "target embeddings and head": target.outer_bytes,
            "target KV cache": target.kv_bytes(ctx_size, n_nodes, cache_type),
            "target activations": target.scratch_bytes(ctx_size, n_rows, n_nodes),
        }
        if draft is not None:
            model = draft.source
            parts["draft embeddings and head"] = model.outer_bytes
            n_run = most_draft_nodes(n_drafted, model.max_tree_leaves)
            window = self._options.spec.draft_window
            draft_ctx = draft_context_size(window, ctx_size, model.max_context, n_run)
            parts["draft KV cache"] = model.kv_bytes(draft_ctx, n_run)
            parts["draft activations"] = model.scratch_bytes(draft_ctx, MAX_BEAMS, n_run)
            parts["draft probabilities"] = self._probability_bytes(model, n_drafted)
        return parts

    def _probability_bytes(self, draft: ModelSource, n_drafted: int) -> int:
        """What drafting keeps beside the draft's logits.

        The rules of chains keep the row that each token was drawn from. A tree's level is ranked
        on a copy of its logits, whose order is one int64 for each, with the noise of the
        positions that its nodes may have.
        """
        spec, n_tokens = self._options.spec, min(draft.vocab_size, self._target.source.vocab_size)
        if spec.draws_chains:
            return min(n_drafted, spec.depth) * n_tokens * _PROBABILITY_BYTES
        noise = MAX_NOISE_POSITIONS * n_tokens * _NOISE_BYTES
        return MAX_BEAMS * n_tokens * _RANKED_LOGIT_BYTES + noise

    def _advice(self, needed: int, shape: Shape) -> str:
        """Which smaller context or KV format would help, and by how much."""
        draft = self._draft if shape.has_draft else None

        def with_change(ctx_size: int, cache_type: str | None = None) -> int:
            parts = self._parts(ctx_size, shape.n_drafted, draft, cache_type)
            return self._needed(parts, draft)

        found = []
        half = self._ctx_size // 2
        if half >= _LEAST_ADVISED_CTX:
            found.append((with_change(half), f"--ctx-size {half}"))
        for cache_type in self._target.source.smaller_cache_types:
            flags = f"--cache-type-k {cache_type} --cache-type-v {cache_type}"
            found.append((with_change(self._ctx_size, cache_type), flags))
        worth = [(n, flags) for n, flags in found if needed - n >= _SMALLEST_STEP_BYTES]
        return "".join(f"; with {flags} it is {format_up(n)}" for n, flags in worth)
