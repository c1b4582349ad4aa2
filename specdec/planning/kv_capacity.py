"""Capacity of the KV cache for several sequences: as much as pays by the predicted throughput.

What a plan reserves for KV holds layers while it is unused (specdec.policy.opportunistic_layers),
so a capacity for many sequences costs a single one next to nothing. Many sequences share each read
of the layers, but their KV takes the memory of layers, which are then read in every pass.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from offload.budget import BudgetExceeded
from specdec.planning.memory.pinnable import SEQUENCE_TOKENS
from specdec.planning.search import Alternative, Search
from specdec.planning.throughput import fastest_together

_MIN_SPEED_SHARE = 0.98
"""Share of a single sequence's speed that a larger KV cache must leave: memory that is planned for
layers holds parts of them, unused memory only whole ones."""
_MIN_GAIN = 1.02
"""Minimum ratio of the throughput to that with the minimum capacity."""
_NUM_STEPS = 5
"""Capacities that are tried."""


def with_kv_capacity(search: Search, chosen: Alternative, total_bytes: int) -> Alternative:
    """Return the chosen plan with the largest KV capacity that pays by the predicted throughput.

    The capacity is as chosen where the options fix it, a single sequence runs at a time, or every
    larger one would slow a single sequence down.
    """
    planner = search.memory_planner
    options, shape = planner.options, chosen.memory_plan.shape
    if options.kv_tokens is not None or options.max_num_seqs < 2 or shape.kv_split is not None:
        return chosen

    def throughput(plan: Alternative) -> float:
        together = fastest_together(plan, options.max_num_seqs, options.spec.width)
        return together.tokens_per_second

    speeds, min_rate = _alone(chosen), _MIN_GAIN * throughput(chosen)
    for kv_tokens in _capacities(chosen.memory_plan.kv_tokens, options.max_num_seqs):
        larger = replace(shape, kv_tokens=kv_tokens)
        if not planner.can_share_kv(larger):
            continue
        with suppress(BudgetExceeded):
            plan = search.try_shape(total_bytes, larger, like=chosen)
            pairs = zip(_alone(plan), speeds, strict=True)
            if all(new >= _MIN_SPEED_SHARE * old for new, old in pairs):
                return plan if throughput(plan) >= min_rate else chosen
    return chosen


def _alone(plan: Alternative) -> tuple[float, float]:
    """Return a single sequence's tokens per second, without draft tokens and with a tree."""
    decoding = plan.decoding(SEQUENCE_TOKENS)
    return decoding.plain_tokens_per_second, decoding.tokens_per_second


def _capacities(minimum: int, num_seqs: int) -> list[int]:
    """Return capacities above the minimum, the largest, for all sequences, first."""
    ratio = num_seqs * SEQUENCE_TOKENS / minimum
    if ratio <= 1.0:
        return []
    return [round(minimum * ratio ** (i / _NUM_STEPS)) for i in range(_NUM_STEPS, 0, -1)]
