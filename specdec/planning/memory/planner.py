"""Division of a memory budget between two models.

The budget is the whole process's. These are subtracted in order: the memory that the process takes
already (measured), headroom for what libraries allocate, the embeddings, heads, KV caches and
activations of both models. The remainder holds layers. The draft's come first, because drafting
reads them once for every level of a tree; those that do not fit stream. The target gets the rest: a
ring of slots through which its layers stream, and as many pinned tensors as fit. The draft's device
and the tree capacity are a `Shape`, which `specdec.planning.search` chooses.

With a GPU there are two ledgers. Everything computed there is in the VRAM ledger, which is divided
first; layers that do not fit there are kept in pinned host memory or streamed through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from backends.contract.source import KvSplit, ModelSource, StoredKv
from offload.budget import MEMORY, BudgetExceeded, MemoryBudget, format_up
from offload.placement.placement import Placement
from offload.placement.tiers import VRAM
from offload.units import MIB
from specdec.config import MAX_DRAFT_TOKENS
from specdec.planning.memory.kv_splits import (
    MAX_ACTIVATION_SHARE,
    larger_splits,
    prompt_sizes,
)
from specdec.planning.memory.memory_plan import Gpu, MemoryPlan, MinBudget, Shape
from specdec.planning.memory.parts import Parts, parts_of_run
from specdec.planning.memory.pinnable import estimate_pinnable
from specdec.planning.memory.placement_planner import (
    CpuPlacementPlanner,
    GpuPlacementPlanner,
    PlacementPlanner,
    WholeGpuPlacementPlanner,
)
from specdec.policy.draft_policy import MAX_AUTO_NODES
from specdec.run_options import CPU, CUDA, RunOptions

HEADROOM_BYTES = 192 * MIB
"""Scratch of matrix products, thread stacks, allocator slack: docs/memory.md."""
SMALL_TREE = 7
"""Draft tokens that every automatic plan reserves memory for."""
BASE_JITTER_BYTES = 8 * MIB
"""Headroom that a run gives up for a budget that is short of its needs by so much: the base memory
of two processes with the same imports differs, so the one that planned may have needed less."""
_MIN_ADVISED_SAVING_BYTES = 16 * MIB
_MIN_ADVISED_CTX = 256
VRAM_HEADROOM_BYTES = 256 * MIB
"""Workspaces of matrix products, and the allocator's rounding."""


class MemoryPlanner:
    """Planner that divides budgets for one pair of models and one set of options.

    Args:
        target, draft: the models as they run on the CPU.
        base_bytes: memory that the process takes already.
        gpu: the GPU that runs the target instead, and perhaps the draft.
    """

    def __init__(
        self,
        target: ModelSource,
        draft: ModelSource | None,
        options: RunOptions,
        base_bytes: int,
        gpu: Gpu | None = None,
    ) -> None:
        self.options = options
        self._gpu = gpu
        how = options.load_mode, options.prefetch_depth
        self._target: PlacementPlanner = (
            CpuPlacementPlanner(target, *how)
            if gpu is None
            else GpuPlacementPlanner(gpu.target, *how)
        )
        self._drafts: dict[str, PlacementPlanner] = {}
        """Planners of the draft by device."""
        cpu_draft = draft if gpu is None else gpu.cpu_draft
        if cpu_draft is not None:
            self._drafts[CPU] = CpuPlacementPlanner(cpu_draft, "auto")
        if gpu is not None and gpu.draft is not None:
            self._drafts[CUDA] = WholeGpuPlacementPlanner(gpu.draft, "ram")
        self._ctx_size = options.context_of(target.max_context)
        self._base_bytes = base_bytes + (0 if gpu is None else gpu.host_bytes)

    @property
    def has_draft(self) -> bool:
        """Whether there is a draft model that memory could be reserved for."""
        return bool(self._drafts)

    @property
    def draft_devices(self) -> tuple[str, ...]:
        """Devices that the draft may run on; (CPU,) without a draft too."""
        return tuple(self._drafts) or (CPU,)

    @property
    def min_drafted(self) -> int:
        """Draft tokens that every plan reserves memory for: those requested, or a small tree."""
        spec = self.options.spec
        if not spec.spec_type:
            return 0
        return SMALL_TREE if spec.num_draft_tokens is None else spec.num_draft_tokens

    @property
    def max_drafted(self) -> int:
        """Maximum number of draft tokens that memory may be reserved for."""
        if not self.options.spec.spec_type or self.options.spec.num_draft_tokens is not None:
            return self.min_drafted
        limit = MAX_AUTO_NODES if self._gpu is None else MAX_DRAFT_TOKENS
        return min(limit, self._target.source.max_tree_leaves or limit)

    def divide(self, total_bytes: int, shape: Shape) -> MemoryPlan:
        """Reserve every part by name and place the layers in the remainder.

        Raises BudgetExceeded with the smallest budget that works for such a shape, and the one of
        a run without the draft (or with it, if the shape leaves it out).
        """
        parts, smallest = self._parts(self._ctx_size, shape), self._smallest_of(shape)
        vram = self._divide_vram(parts, shape)
        needed = self._needed(parts, shape, vram)
        if needed > total_bytes + BASE_JITTER_BYTES:
            # The smallest may have a part of its KV in a file.
            advice = self._advice(min(needed, smallest.host_bytes), total_bytes, shape, vram)
            advice += self._advice_on_draft(shape, MEMORY)
            raise BudgetExceeded("this run", needed, total_bytes, smallest.host_bytes, advice)
        smallest = smallest.at_most(total_bytes)
        headroom_bytes = HEADROOM_BYTES - max(needed - total_bytes, 0)
        budget = MemoryBudget(total_bytes, self._base_bytes, headroom_bytes)
        _reserve(budget, None, parts)
        draft_plan = self._place_draft(budget, vram, shape)
        device_bytes = 0 if vram is None else vram.available_bytes
        target_plan = self._target.place(budget.available_bytes, device_bytes)
        _reserve(budget, vram, self._target.parts(target_plan))
        source, table = self._target.source, dict(budget.table())
        pinnable = estimate_pinnable(
            table, source, target_plan, self.options, self.kv_tokens(shape), shape.n_drafted
        )
        return MemoryPlan(
            budget,
            target_plan,
            draft_plan,
            self._ctx_size,
            self.kv_tokens(shape),
            shape,
            smallest,
            self.smallest_alone,
            vram,
            self._stored_kv(shape),
            pinnable,
        )

    def _stored_kv(self, shape: Shape) -> StoredKv | None:
        if shape.kv_split is None:
            return None
        return self._target.source.stored_kv(
            (self._ctx_size, self.kv_tokens(shape)),
            shape.kv_split,
            self.options.max_target_tokens(shape.n_drafted),
            self.options.target_nodes(shape.n_drafted),
        )

    def split_shapes(self, total_bytes: int, shape: Shape) -> list[Shape]:
        """Return the shapes with a part of the KV cache in a file that are worth a comparison: from
        the least KV in memory to the most beside a ring. None where no part can be.

        A byte of KV in memory saves as much reading as one of a layer, but only in a context of
        full length, and takes memory for staging off.
        """
        smallest = self._smallest_split(shape, total_bytes)
        if smallest is None or smallest.kv_split is None:
            return []
        split, kv_tokens = smallest.kv_split, self.kv_tokens(shape)
        needed = self._needed(self._parts(self._ctx_size, smallest), smallest, None)
        kv_bytes = self._target.source.kv_bytes(kv_tokens, 0)
        growth = max(0, total_bytes - needed) * kv_tokens // kv_bytes
        growth = min(growth, kv_tokens - split.hot_tokens)
        return [replace(shape, kv_split=x) for x in larger_splits(split, growth)]

    def _smallest_split(self, shape: Shape, total_bytes: int | None = None) -> Shape | None:
        """Return the shape with the least KV in memory, and as many prompt tokens per pass as a
        budget allows; None where that saves nothing worth a file."""
        source, draft = self._target.source, self._draft(shape)
        if self._gpu is not None or not source.can_store_kv:
            return None
        if draft is not None and draft.source.attends_to_target:
            return None
        whole = sum(self._parts(self._ctx_size, shape).host.values())
        hot_tokens = source.min_hot_tokens(self.options.target_nodes(shape.n_drafted))
        if hot_tokens >= self.kv_tokens(shape):
            return None
        splits = [KvSplit(hot_tokens, n) for n in prompt_sizes(self._ctx_size)]
        shapes = [replace(shape, kv_split=split) for split in splits]
        sizes = [self._parts(self._ctx_size, x).host for x in shapes]
        if whole - sum(sizes[-1].values()) < _MIN_ADVISED_SAVING_BYTES:
            return None
        if total_bytes is None:
            return shapes[-1]
        limit = MAX_ACTIVATION_SHARE * total_bytes
        for candidate, parts in zip(shapes, sizes, strict=True):
            needed = self._needed(Parts(parts), candidate, None)
            if parts["target activations"] <= limit and needed <= total_bytes:
                return candidate
        return shapes[-1]

    def kv_tokens(self, shape: Shape, ctx_size: int | None = None) -> int:
        """Return the capacity of the target's KV cache, in tokens of all sequences together.

        ctx_size: context that differs from the run's.
        """
        minimum = self.options.min_kv_tokens(ctx_size or self._ctx_size)
        return max(minimum, shape.kv_tokens or 0)

    def can_share_kv(self, shape: Shape) -> bool:
        """Return whether both models' outputs are the same with this shape's KV capacity."""
        ctx_size, kv_tokens = self._ctx_size, self.kv_tokens(shape)
        draft, n_nodes = self._draft(shape), self.options.target_nodes(shape.n_drafted)
        sources = [self._target.source, *(() if draft is None else (draft.source,))]
        return all(source.can_share_kv(ctx_size, kv_tokens, n_nodes) for source in sources)

    @cached_property
    def smallest(self) -> MinBudget:
        """The smallest budgets that work: for the smallest tree and the minimum of both models."""
        return self._smallest([Shape(self.min_drafted, device) for device in self.draft_devices])

    @cached_property
    def smallest_alone(self) -> MinBudget:
        """The smallest budgets that work without the draft model."""
        return self._smallest([Shape(self.min_drafted, None)])

    def _smallest(self, shapes: Sequence[Shape]) -> MinBudget:
        needed, needed_vram = [], []
        splits = map(self._smallest_split, shapes)
        for shape in (*shapes, *(split for split in splits if split is not None)):
            parts = self._parts(self._ctx_size, shape)
            if self._gpu is not None:
                needed_vram.append(self._needed_vram(self._gpu, parts, shape))
                if needed_vram[-1] > self._gpu.vram_bytes:
                    continue
            needed.append(self._needed(parts, shape, self._divide_vram(parts, shape)))
        return MinBudget(_rounded(min(needed, default=0)), _rounded(min(needed_vram, default=0)))

    def _smallest_of(self, shape: Shape) -> MinBudget:
        return self.smallest if self._draft(shape) is not None else self.smallest_alone

    def _draft(self, shape: Shape) -> PlacementPlanner | None:
        return self._drafts.get(shape.draft_device or "")

    def _place_draft(
        self, budget: MemoryBudget, vram: MemoryBudget | None, shape: Shape
    ) -> Placement | None:
        draft = self._draft(shape)
        if draft is None:
            return None
        left = budget.available_bytes - self._min_target_bytes(shape, vram)
        device_bytes = draft.min_device_bytes()
        plan = draft.place(left, device_bytes)
        _reserve(budget, vram, draft.parts(plan), "draft ")
        return plan

    def _divide_vram(self, parts: Parts, shape: Shape) -> MemoryBudget | None:
        """Return the VRAM ledger with all but the layers; raise BudgetExceeded where the minimum of
        these does not fit."""
        if self._gpu is None:
            return None
        total_bytes, needed = self._gpu.vram_bytes, self._needed_vram(self._gpu, parts, shape)
        if needed > total_bytes:
            smallest, advice = self._smallest_of(shape), self._advice_on_draft(shape, VRAM)
            raise BudgetExceeded(
                "this run", needed, total_bytes, smallest.vram_bytes, advice, ledger=VRAM
            )
        vram = MemoryBudget(total_bytes, self._gpu.base_bytes, VRAM_HEADROOM_BYTES, ledger=VRAM)
        _reserve(None, vram, parts)
        return vram

    def _needed_vram(self, gpu: Gpu, parts: Parts, shape: Shape) -> int:
        draft = self._draft(shape)
        minimum = self._target.min_device_bytes()
        minimum += draft.min_device_bytes() if draft else 0
        return gpu.base_bytes + VRAM_HEADROOM_BYTES + sum(parts.gpu.values()) + minimum

    def _needed(self, parts: Parts, shape: Shape, vram: MemoryBudget | None) -> int:
        draft = self._draft(shape)
        minimum = self._min_target_bytes(shape, vram)
        minimum += draft.min_bytes(draft.min_device_bytes()) if draft else 0
        return self._base_bytes + HEADROOM_BYTES + sum(parts.host.values()) + minimum

    def _min_target_bytes(self, shape: Shape, vram: MemoryBudget | None) -> int:
        """Return the host memory that the target needs once the draft has its part of the VRAM."""
        draft = self._draft(shape)
        device_bytes = 0 if vram is None else vram.available_bytes
        device_bytes -= draft.min_device_bytes() if draft else 0
        return self._target.min_bytes(device_bytes)

    def _parts(
        self, ctx_size: int, shape: Shape, cache_type: str | None = None, **changes: Any
    ) -> Parts:
        """changes: options that differ from the run's."""
        target, draft = self._target.source, self._draft(shape)
        return parts_of_run(
            target if cache_type is None else target.with_cache_type(cache_type),
            None if draft is None else draft.source,
            replace(self.options, **changes),
            ctx_size,
            self.kv_tokens(shape, ctx_size),
            shape.n_drafted,
            is_on_gpu=self._gpu is not None,
            is_draft_on_gpu=shape.draft_device == CUDA,
            kv_split=shape.kv_split,
        )

    def _advice(
        self, needed: int, total_bytes: int, shape: Shape, vram: MemoryBudget | None
    ) -> str:
        """Return the smaller context or KV formats that would help, with the budget of each: the
        half, quarter and so on of the context that fits, or the half where none does."""

        def with_change(ctx_size: int, **changes: Any) -> int:
            return self._needed(self._parts(ctx_size, shape, **changes), shape, vram)

        sizes = [self._ctx_size >> i for i in range(1, self._ctx_size.bit_length())]
        shorter = [
            (with_change(size), f"--ctx-size {size}") for size in sizes if size >= _MIN_ADVISED_CTX
        ]
        fitting = [change for change in shorter if change[0] <= total_bytes]
        changes = (fitting or shorter)[:1]
        for cache_type in self._target.source.smaller_cache_types:
            flags = f"--cache-type-k {cache_type} --cache-type-v {cache_type}"
            changes.append((with_change(self._ctx_size, cache_type=cache_type), flags))
        fewer = self.options.max_num_seqs // 2
        if fewer and self._target.source.state_bytes(1, 0):
            changes.append((with_change(self._ctx_size, parallel=fewer), f"--parallel {fewer}"))
        useful = [(n, flags) for n, flags in changes if needed - n >= _MIN_ADVISED_SAVING_BYTES]
        return "".join(f"; with {flags} it is {format_up(n)}" for n, flags in useful)

    def _advice_on_draft(self, shape: Shape, ledger: str) -> str:
        """Return the smallest budget of the other choice: without the shape's draft, or with it."""
        if not self.has_draft:
            return ""
        with_draft, alone = self.smallest.of(ledger), self.smallest_alone.of(ledger)
        if self._draft(shape) is None:
            return f"; with the draft it is {format_up(with_draft)}" if with_draft else ""
        return f"; without the draft it is {format_up(alone)}" if alone < with_draft else ""


def _reserve(
    host: MemoryBudget | None, vram: MemoryBudget | None, parts: Parts, prefix: str = ""
) -> None:
    """Reserve the parts in their ledgers; a ledger of None is skipped."""
    for ledger, n_bytes_by_name in ((host, parts.host), (vram, parts.gpu)):
        for name, n_bytes in n_bytes_by_name.items():
            if ledger is not None:
                ledger.reserve(prefix + name, n_bytes)


def _rounded(n_bytes: int) -> int:
    """Round up to whole MiB, as errors and plans name the smallest budget."""
    return -(-n_bytes // MIB) * MIB
