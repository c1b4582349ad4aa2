"""Search for the memory plan that decodes fastest: a few are compared by predicted tokens/s.

A byte can hold a part of the target that is then not read in every pass, a layer of the draft that
is then not read for every level of every tree, or a part of a larger tree. The time of a pass is
simulated (`specdec.planning.pass_simulation`); the tokens accepted from a tree are assumed
(`specdec.policy.assumptions`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from offload.budget import BudgetExceeded
from offload.placement.placement import Placement
from specdec.config import MAX_DRAFT_TOKENS, SpecConfig
from specdec.planning.measurements import Measurements
from specdec.planning.memory.memory_plan import MemoryPlan, Shape
from specdec.planning.memory.pinnable import SEQUENCE_TOKENS
from specdec.planning.memory.planner import MemoryPlanner
from specdec.planning.pass_simulation import PassSimulation
from specdec.policy.assumptions import (
    ASSUMED_NGRAM_SHARE,
    best_depth,
    expected_tokens,
    likely_levels,
)
from specdec.policy.cost_model import run_tokens, runs_of_levels

_TREES = tuple(2**k - 1 for k in range(1, MAX_DRAFT_TOKENS.bit_length()))
"""Tree sizes that are compared; sizes beyond MAX_AUTO_NODES on a GPU only. With its root a tree has
a power of two of rows: kernels take 16 rows at a time, and one more costs as much as 16 (a 27B in
Q4_K_M, Zen 3: 0.86 tokens/s with 15 draft tokens, 0.70 with 16)."""
PAYS_TO_LEAVE_OUT = 1.05
"""Speedup of running without the draft from which the draft is not loaded."""
_WIDE_TREE = 63
"""Draft tokens that memory is reserved for where that costs little, even if fewer should be best:
acceptance may be better than assumed. With simulated times pair:mtp brings 1.07 times the speed
with 64 instead of 32, and no more with 128."""
_MIN_SPEED_SHARE = 0.95
"""Share of the speed with the smallest tree capacity that a larger capacity must leave."""


@dataclass(frozen=True)
class Alternative:
    """One memory plan, with its predicted speed."""

    memory_plan: MemoryPlan
    target: PassSimulation
    draft: PassSimulation | None
    n_tree: int
    """Draft tokens of the tree that should be fastest, within the plan's capacity."""
    depth: int
    """Levels of that tree; 0 without a draft model."""
    drafting_seconds: float
    """Seconds to draft one tree, hidden by the ring's reads or not."""
    tokens_per_pass: float
    """Assumed tokens per step, from `specdec.policy.assumptions`."""
    tokens_per_second: float

    def decoding(self, n_tokens: int) -> Alternative:
        """Return the plan while sequences of `n_tokens` in total leave unused memory to layers."""
        memory_plan, num_tokens = self.memory_plan, 1 + self.n_tree
        placement = memory_plan.pinnable.with_pinned_layers(
            memory_plan.target, n_tokens, num_tokens
        )
        stored_kv = memory_plan.stored_kv
        kv_read_bytes = () if stored_kv is None else stored_kv.layer_read_bytes(n_tokens)
        target = replace(self.target, placement=placement, kv_read_bytes=kv_read_bytes)
        seconds = _step_seconds(target, self.draft, num_tokens, self.drafting_seconds)
        return replace(self, target=target, tokens_per_second=self.tokens_per_pass / seconds)

    def with_tree_of(self, other: Alternative) -> Alternative:
        """Return the plan with the tree of another one, whose draft runs as fast."""
        tokens, drafting = other.tokens_per_pass, other.drafting_seconds
        seconds = _step_seconds(self.target, self.draft, 1 + other.n_tree, drafting)
        return replace(
            self,
            n_tree=other.n_tree,
            depth=other.depth,
            drafting_seconds=drafting,
            tokens_per_pass=tokens,
            tokens_per_second=tokens / seconds,
        )

    @property
    def speeds(self) -> tuple[float, float]:
        """Tokens per second without pinned layers, and while a usual sequence is decoded."""
        return self.tokens_per_second, self.decoding(SEQUENCE_TOKENS).tokens_per_second

    @property
    def at_whole_context(self) -> Alternative:
        """The plan at the end of a sequence of the whole context."""
        return self.decoding(self.memory_plan.ctx_size)

    @property
    def plain_tokens_per_second(self) -> float:
        """Tokens per second predicted without drafting."""
        return 1.0 / self.target.seconds(1)

    @property
    def better_tokens_per_second(self) -> float:
        """Tokens per second with or without drafting, whichever is faster (the policy decides)."""
        return max(self.tokens_per_second, self.plain_tokens_per_second)

    @property
    def name(self) -> str:
        """Short name for the table: the draft, tree capacity and slots of this plan."""
        shape, parts = self.memory_plan.shape, []
        target = self.target.placement
        if self.draft is not None:
            parts.append(self._draft_name(self.draft.placement))
        elif shape.n_drafted == 0 or shape.draft_device is None:
            parts.append("no draft")
        if shape.n_drafted:
            parts.append(f"capacity for {shape.n_drafted}")
        if shape.kv_tokens is not None:
            parts.append(f"KV for {shape.kv_tokens}")
        if shape.kv_split is not None:
            parts.append(f"KV of {shape.kv_split.hot_tokens} in memory")
        if target.n_slots:
            parts.append(f"{target.n_slots} slots")
        if target.n_device_slots:
            parts.append(f"{target.n_device_slots} on the GPU")
        return ", ".join(parts)

    def _draft_name(self, draft: Placement) -> str:
        if draft.is_on_device:
            return "draft on the GPU"
        share = draft.resident_bytes / max(1, sum(layer.n_bytes for layer in draft.layers))
        where = "on the CPU" if self.target.placement.is_on_device else "in memory"
        return f"draft {where}" if share >= 1 else f"{share:.0%} of the draft {where}"

    def to_dict(self) -> dict[str, Any]:
        placement = self.target.placement
        return {
            "name": self.name,
            "draft_device": self.memory_plan.shape.draft_device if self.draft else None,
            "n_slots": placement.n_slots,
            "num_draft_tokens": self.memory_plan.n_drafted,
            "draft_resident_bytes": self.draft.placement.resident_bytes if self.draft else 0,
            "streamed_bytes_per_pass": placement.streamed_bytes,
            "tree_tokens": self.n_tree,
            "draft_depth": self.depth,
            "drafting_seconds": self.drafting_seconds,
            "pass_seconds_1": self.target.seconds(1),
            "pass_seconds": self.target.seconds(1 + self.n_tree),
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass
class Search:
    """Search for the best memory plan for one budget; use an instance once."""

    memory_planner: MemoryPlanner
    measurements: Measurements
    alternatives: list[Alternative] = field(default_factory=list)
    """Memory plans that were tried."""
    refusals: list[BudgetExceeded] = field(default_factory=list)
    """Error for each device whose memory cannot hold the draft."""
    plain: Alternative | None = None
    """The plan for plain decoding without the draft, if it was compared with one."""

    def best(self, total_bytes: int) -> Alternative:
        """Return the fastest plan. The draft is left out if it costs more than it gains, or if it
        does not fit and the options allow a run without it.

        Raises BudgetExceeded with the smallest budget that works.
        """
        if not self.memory_planner.has_draft:
            return self._with_capacity(total_bytes, Shape(self.memory_planner.min_drafted))
        best = self._best_with_draft(total_bytes)
        if best is None:
            return self.alone(total_bytes)
        self.plain = self._try_in_memory_or_split(total_bytes, Shape(0, None))
        if self.should_leave_out(best, lambda plan: plan.better_tokens_per_second):
            return self.alone(total_bytes)
        return best

    def should_leave_out(self, best: Alternative, speed: Callable[[Alternative], float]) -> bool:
        """Return whether a draft with which plans have this speed is not worth its memory: that is
        lost for the whole run, and a streamed target could use it."""
        is_possible = self.memory_planner.options.may_leave_out_draft
        if best.draft is None or not is_possible or not best.target.placement.n_moving_layers:
            return False
        # Capacity for wide trees is no price of the draft: the fastest plan may have less.
        fastest = max(speed(plan) for plan in self.alternatives if plan.draft is not None)
        assert self.plain is not None, "compared with a draft"
        return self.plain.tokens_per_second > PAYS_TO_LEAVE_OUT * fastest

    def alone(self, total_bytes: int) -> Alternative:
        """Return the fastest plan without the draft model; n-grams go on drafting."""
        return self._with_capacity(total_bytes, Shape(self.memory_planner.min_drafted, None))

    def _best_with_draft(self, total_bytes: int) -> Alternative | None:
        """Return the fastest plan with the draft; None if it fits on no device and is optional.

        Raises BudgetExceeded where the draft is required and does not fit.
        """
        plans, minimum = [], self.memory_planner.min_drafted
        for device in self.memory_planner.draft_devices:
            try:
                plans.append(self._with_capacity(total_bytes, Shape(minimum, device)))
            except BudgetExceeded as error:
                self.refusals.append(error)
        if not plans and self.memory_planner.options.requires_draft:
            raise self.refusals[0]
        return max(plans, key=lambda plan: plan.tokens_per_second, default=None)

    def _with_capacity(self, total_bytes: int, shape: Shape) -> Alternative:
        """Return the fastest plan, with capacity for larger trees where that costs little."""
        best = self._try_in_memory_or_split(total_bytes, shape)
        shape = best.memory_plan.shape
        for n_drafted in self._larger_capacities(best):
            with suppress(BudgetExceeded):
                result = self.try_shape(total_bytes, replace(shape, n_drafted=n_drafted))
                speeds = zip(result.speeds, best.speeds, strict=True)
                if all(speed >= _MIN_SPEED_SHARE * best_speed for speed, best_speed in speeds):
                    return result
        return best

    def _try_in_memory_or_split(self, total_bytes: int, shape: Shape) -> Alternative:
        """Return the plan of a shape; if its KV cache does not fit, the one with a part of it in a
        file that is fastest at the end of a whole context."""
        try:
            return self.try_shape(total_bytes, shape)
        except BudgetExceeded:
            splits = []
            for split in self.memory_planner.split_shapes(total_bytes, shape):
                with suppress(BudgetExceeded):
                    splits.append(self.try_shape(total_bytes, split))
            if not splits:
                raise
        return max(splits, key=lambda plan: plan.at_whole_context.better_tokens_per_second)

    def _larger_capacities(self, minimum: Alternative) -> list[int]:
        """Return larger capacities to try, in draft tokens, largest first."""
        limit, spec = self.memory_planner.max_drafted, self.memory_planner.options.spec
        if limit <= minimum.memory_plan.n_drafted:
            return []
        # A tree's speed does not depend on the capacity: the best size is known before.
        tree = predict(minimum.memory_plan, self.measurements, spec, num_capacity=limit).n_tree
        wide = spec.depth if spec.width == 1 else _WIDE_TREE  # a chain has a node per level
        sizes = {tree, min(limit, wide)}
        return sorted((n for n in sizes if n > minimum.memory_plan.n_drafted), reverse=True)

    def try_shape(
        self, total_bytes: int, shape: Shape, like: Alternative | None = None
    ) -> Alternative:
        """Return the plan of one shape with its predicted speed, and list it as compared.

        like: a plan whose tree it is predicted with; None: the fastest tree.

        Raises BudgetExceeded where it does not fit.
        """
        memory_plan = self.memory_planner.divide(total_bytes, shape)
        spec = self.memory_planner.options.spec
        result = predict(memory_plan, self.measurements, spec)
        if like is not None:
            result = result.with_tree_of(like)
        self.alternatives.append(result)
        return result


def predict(
    memory_plan: MemoryPlan,
    measurements: Measurements,
    spec: SpecConfig,
    num_capacity: int | None = None,
    gain: float | None = None,
) -> Alternative:
    """Predict the speed of a memory plan with the best tree that its capacity allows.

    num_capacity: capacity to assume instead of the plan's own, in draft tokens.
    gain: accepted tokens of a tree, in multiples of the assumed ones of a draft model.
    """
    speeds = measurements.storage_bytes_per_second, measurements.copy_bytes_per_second
    target = PassSimulation(
        memory_plan.target, measurements.target, *speeds, measurements.expert_seconds_per_byte
    )
    draft, draft_compute = None, measurements.draft_on(memory_plan.shape.draft_device)
    if memory_plan.draft is not None and draft_compute is not None:
        draft = PassSimulation(memory_plan.draft, draft_compute, *speeds)
    num_capacity = memory_plan.n_drafted if num_capacity is None else num_capacity
    sizes = [n for n in _TREES if n <= num_capacity] if spec.num_draft_tokens is None else []
    if sizes and draft is None:
        sizes = [0, *sizes]  # n-grams draft only where the text repeats itself
    if gain is None:
        gain = ASSUMED_NGRAM_SHARE if draft is None else 1.0
    trees = [
        _predict_tree(memory_plan, target, draft, n, spec, gain) for n in sizes or [num_capacity]
    ]
    return max(trees, key=lambda tree: tree.tokens_per_second)


def _predict_tree(
    memory_plan: MemoryPlan,
    target: PassSimulation,
    draft: PassSimulation | None,
    n_drafted: int,
    spec: SpecConfig,
    gain: float,
) -> Alternative:
    block_size = None if draft is None else draft.compute.block_size
    run = 0.0 if draft is None else draft.seconds(run_tokens(n_drafted, spec.width, block_size))
    per_level = run if block_size is None else 0.0
    depth = best_depth(spec, min(spec.depth, n_drafted), target.seconds(1 + n_drafted), per_level)
    if draft is not None:
        depth = min(depth, likely_levels(n_drafted, spec.width), (block_size or depth + 1) - 1)
    drafting = runs_of_levels(depth, block_size) * run
    seconds = _step_seconds(target, draft, 1 + n_drafted, drafting)
    tokens = min(1 + gain * (expected_tokens(n_drafted, depth) - 1), 1 + depth)
    return Alternative(
        memory_plan, target, draft, n_drafted, depth, drafting, tokens, tokens / seconds
    )


def _step_seconds(
    target: PassSimulation, draft: PassSimulation | None, num_tokens: int, drafting_seconds: float
) -> float:
    """Return the seconds of drafting and the pass that follows it."""
    if draft is not None and draft.placement.n_slots:
        # A streamed draft has the storage to itself: nothing of the target is read meanwhile.
        return target.seconds(num_tokens) + drafting_seconds
    return target.times(num_tokens, drafting_seconds).cycle_seconds
