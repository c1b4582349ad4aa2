"""Which division of the memory decodes fastest: a few are compared by their predicted tokens/s.

A byte can hold a part of the target that is then not read in every pass, a layer of the draft that
is then not read for every level of every tree, or room for a larger tree. What a pass takes is
simulated (`specdec.planning.pass_simulation`); what a tree brings is assumed
(`specdec.policy.assumptions`).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from backends.contract.source import ModelCompute
from offload.budget import BudgetExceeded
from offload.placement.placement import Placement
from specdec.config import MAX_DRAFT_TOKENS, SpecConfig
from specdec.drafters.model import level_width
from specdec.planning.memory.memory_plan import MemoryPlan, MemoryPlanner, Shape
from specdec.planning.memory.pinnable import TEXT_TOKENS
from specdec.planning.pass_simulation import PassSimulation
from specdec.policy.assumptions import (
    ASSUMED_NGRAM_SHARE,
    best_depth,
    expected_tokens,
    likely_levels,
)
from specdec.policy.draft_policy import MAX_AUTO_NODES
from specdec.run_options import CUDA

_TREES = (1, 2, 4, 8, 16, 32, 64, MAX_AUTO_NODES, 256, 512, MAX_DRAFT_TOKENS)
"""Those beyond MAX_AUTO_NODES on a GPU only."""
_PAYS_TO_LEAVE_OUT = 1.05
"""How much faster the target has to be alone for its draft not to be loaded."""
_ROOMS = (4, 1)
"""Times the best tree, the first of these that fits is set aside: acceptance may be better than
assumed. But not at the cost of speed:"""
_ROOM_COSTS_LITTLE = 0.99
"""Of the speed with the least room must be left."""


@dataclass(frozen=True)
class Measurements:
    """A machine's speed, for one pair of models."""

    storage_bytes_per_second: float
    target: ModelCompute
    draft: ModelCompute | None
    """On the CPU."""
    gpu_draft: ModelCompute | None = None
    copy_bytes_per_second: float = 0.0
    """From pinned host memory to the GPU's, if the target runs there."""
    expert_seconds_per_byte: float = 0.0
    """Of the target's experts that are missing, beside what the storage's bandwidth says."""

    def draft_on(self, device: str | None) -> ModelCompute | None:
        return self.gpu_draft if device == CUDA else self.draft


@dataclass(frozen=True)
class Alternative:
    """One division, with what is predicted of it."""

    memory_plan: MemoryPlan
    target: PassSimulation
    draft: PassSimulation | None
    n_tree: int
    """Draft tokens of the tree that should be the fastest, in the room that there is."""
    depth: int
    """Its levels; 0 without a draft model."""
    drafting_seconds: float
    """For one tree, hidden by the ring or not."""
    tokens_per_pass: float
    """Assumed."""
    tokens_per_second: float

    def decoding(self, n_tokens: int) -> Alternative:
        """Its speed while sequences of so many tokens, together, leave memory to layers."""
        memory_plan, num_tokens = self.memory_plan, 1 + self.n_tree
        placement = memory_plan.pinnable.pin_layers(memory_plan.target, n_tokens, num_tokens)
        target = replace(self.target, placement=placement)
        seconds = _step_seconds(target, self.draft, num_tokens, self.drafting_seconds)
        return replace(self, target=target, tokens_per_second=self.tokens_per_pass / seconds)

    @property
    def speeds(self) -> tuple[float, float]:
        """Tokens per second while nothing is lent, and while a usual text is decoded."""
        return self.tokens_per_second, self.decoding(TEXT_TOKENS).tokens_per_second

    @property
    def plain_tokens_per_second(self) -> float:
        """Predicted without drafting."""
        return 1.0 / self.target.seconds(1)

    @property
    def better_tokens_per_second(self) -> float:
        """With the draft or beside it, unused: the policy finds out which is faster."""
        return max(self.tokens_per_second, self.plain_tokens_per_second)

    @property
    def name(self) -> str:
        """What is special about it."""
        shape, parts = self.memory_plan.shape, []
        target = self.target.placement
        if self.draft is not None:
            parts.append(self._draft_name(self.draft.placement))
        elif shape.n_drafted == 0 or shape.draft_device is None:
            parts.append("no draft")
        if shape.n_drafted:
            parts.append(f"room for {shape.n_drafted}")
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
    """Finds the best division for one budget, once."""

    memory_planner: MemoryPlanner
    measurements: Measurements
    alternatives: list[Alternative] = field(default_factory=list)
    """Those that were tried."""
    refusals: list[BudgetExceeded] = field(default_factory=list)
    """For each device that has no room for the draft, what it lacks."""

    def best(self, total_bytes: int) -> Alternative:
        """The fastest, with the draft; without it where it takes more than it brings, or where
        there is no room for it and a run without it was not refused by the options.

        Raises BudgetExceeded with the smallest budget that works.
        """
        if not self.memory_planner.has_draft:
            return self._with_capacity(total_bytes, Shape(self.memory_planner.min_drafted))
        best = self._best_with_draft(total_bytes)
        if best is None:
            return self.alone(total_bytes)
        alone = self._try(total_bytes, Shape(0, None))
        # Memory is what a draft costs for good, and what a target that streams could use.
        if (
            self.memory_planner.options.may_leave_out_draft
            and best.target.placement.n_moving_layers
            and alone.tokens_per_second > _PAYS_TO_LEAVE_OUT * best.better_tokens_per_second
        ):
            return self.alone(total_bytes)
        return best

    def alone(self, total_bytes: int) -> Alternative:
        """The fastest without the draft model; n-grams go on drafting."""
        return self._with_capacity(total_bytes, Shape(self.memory_planner.min_drafted, None))

    def _best_with_draft(self, total_bytes: int) -> Alternative | None:
        """None where there is no room for the draft on any device, and the run may do without.

        Raises BudgetExceeded where it may not.
        """
        result, minimum = [], self.memory_planner.min_drafted
        for device in self.memory_planner.draft_devices:
            try:
                result.append(self._with_capacity(total_bytes, Shape(minimum, device)))
            except BudgetExceeded as error:
                self.refusals.append(error)
        if not result and self.memory_planner.options.requires_draft:
            raise self.refusals[0]
        return max(result, key=lambda item: item.tokens_per_second, default=None)

    def _with_capacity(self, total_bytes: int, shape: Shape) -> Alternative:
        """With room for the best tree and larger ones, as far as that costs little."""
        best = self._try(total_bytes, shape)
        for n_drafted in self._rooms(best):
            with suppress(BudgetExceeded):
                result = self._try(total_bytes, replace(shape, n_drafted=n_drafted))
                speeds = zip(result.speeds, best.speeds, strict=True)
                if all(speed >= _ROOM_COSTS_LITTLE * minimum for speed, minimum in speeds):
                    return result
        return best

    def _rooms(self, minimum: Alternative) -> list[int]:
        """Draft tokens that there may be room for, the most first."""
        limit, spec = self.memory_planner.max_drafted, self.memory_planner.options.spec
        if limit <= minimum.memory_plan.n_drafted:
            return []
        # A tree's arithmetic does not depend on its room: the best one is known before it has any.
        tree = predict(minimum.memory_plan, self.measurements, spec, num_capacity=limit).n_tree
        rooms = {min(limit, times * tree) for times in _ROOMS}
        return sorted((n for n in rooms if n > minimum.memory_plan.n_drafted), reverse=True)

    def _try(self, total_bytes: int, shape: Shape) -> Alternative:
        memory_plan, spec = (
            self.memory_planner.divide(total_bytes, shape),
            self.memory_planner.options.spec,
        )
        result = predict(memory_plan, self.measurements, spec)
        self.alternatives.append(result)
        return result


def predict(
    memory_plan: MemoryPlan,
    measurements: Measurements,
    spec: SpecConfig,
    num_capacity: int | None = None,
) -> Alternative:
    """The speed of a division: with the best tree among those that there is room for.

    n_room: what the room is taken to be, in draft tokens.
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
        sizes = [0, *sizes]  # n-grams draft where the text repeats itself, and not at any price
    result = [_predict_tree(memory_plan, target, draft, n, spec) for n in sizes or [num_capacity]]
    return max(result, key=lambda item: item.tokens_per_second)


def _predict_tree(
    memory_plan: MemoryPlan,
    target: PassSimulation,
    draft: PassSimulation | None,
    n_drafted: int,
    spec: SpecConfig,
) -> Alternative:
    n_abreast = max(1, min(n_drafted, level_width(n_drafted)))
    level = draft.seconds(n_abreast) if draft is not None else 0.0
    depth = best_depth(spec, min(spec.depth, n_drafted), target.seconds(1 + n_drafted), level)
    if draft is not None:
        depth = min(depth, likely_levels(n_drafted, spec.width))
    drafting = depth * level
    seconds = _step_seconds(target, draft, 1 + n_drafted, drafting)
    tokens = expected_tokens(n_drafted, depth)
    if draft is None:
        tokens = 1 + ASSUMED_NGRAM_SHARE * (tokens - 1)
    return Alternative(
        memory_plan, target, draft, n_drafted, depth, drafting, tokens, tokens / seconds
    )


def _step_seconds(
    target: PassSimulation, draft: PassSimulation | None, num_tokens: int, drafting_seconds: float
) -> float:
    """Return the seconds of drafting and the pass that follows it."""
    if draft is not None and draft.placement.n_slots:
        # It has the storage to itself: nothing of the target is read meanwhile.
        return target.seconds(num_tokens) + drafting_seconds
    return target.times(num_tokens, drafting_seconds).cycle_seconds
