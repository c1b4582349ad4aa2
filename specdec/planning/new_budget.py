"""A loaded run with another budget: whether it stays as it is loaded.

What a plan reserves is fixed once it is loaded: ring, KV, draft, activations and resident layers.
The rest of the budget holds layers that come and go (specdec.policy.opportunistic_layers), so a
budget may change without loading anything, down to what is fixed.
"""

from __future__ import annotations

from dataclasses import replace

from specdec.planning.memory.pinnable import PinnableMemory
from specdec.planning.plan import PlannedModels
from specdec.planning.run_plan import RunPlan
from specdec.planning.throughput import fastest_together

_MIN_SPEED_SHARE = 0.9
"""Minimum share of the predicted speed of the models loaded again, of one sequence and of several:
loading takes a read of all that stays in memory, and drops the KV of finished sequences."""


def adjusted_plan(present: RunPlan, planned: PlannedModels) -> RunPlan | None:
    """Return the present plan with the budget of `planned`, which fixes no more memory; None where
    its parts do not fit, or where loading again pays."""
    adjusted = _with_budget(present, planned.plan)
    if adjusted is None:
        return None
    pairs = zip(_speeds(adjusted, planned), _speeds(planned.plan, planned), strict=True)
    return adjusted if all(own >= _MIN_SPEED_SHARE * new for own, new in pairs) else None


def _with_budget(present: RunPlan, new: RunPlan) -> RunPlan | None:
    """Return a plan of the present parts in the new budget; None where they do not fit."""
    memory_plan, total_bytes = present.chosen.memory_plan, new.budget_bytes
    growth_bytes = total_bytes - memory_plan.budget.total_bytes
    if growth_bytes + memory_plan.budget.available_bytes < 0:
        return None
    pinnable = memory_plan.pinnable
    if pinnable != PinnableMemory():
        pinnable = replace(pinnable, max_bytes=pinnable.max_bytes + growth_bytes)
    budget = memory_plan.budget.with_total(total_bytes)
    chosen = replace(
        present.chosen, memory_plan=replace(memory_plan, budget=budget, pinnable=pinnable)
    )
    source = new.budget_source
    return replace(present, chosen=chosen, alternatives=(chosen,), budget_source=source)


def _speeds(plan: RunPlan, planned: PlannedModels) -> tuple[float, float]:
    """Return predicted tokens per second of one sequence, and of as many as is fastest."""
    options = planned.options
    together = fastest_together(plan.chosen, options.max_num_seqs, options.spec.width)
    return plan.decoding.better_tokens_per_second, together.tokens_per_second
