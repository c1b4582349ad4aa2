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
_NUM_STEPS = 4
"""Capacities between two powers of two."""


def with_kv_capacity(search: Search, chosen: Alternative, total_bytes: int) -> Alternative:
    """Return the chosen plan with the KV capacity of the highest predicted throughput.

    The capacity is as chosen where the options fix it, a single sequence runs at a time, or a
    larger one would slow a single sequence down.
    """
    options = search.memory_planner.options
    if options.kv_tokens is not None or options.max_num_seqs < 2:
        return chosen
    width = options.spec.width

    def throughput(plan: Alternative) -> float:
        return fastest_together(plan, options.max_num_seqs, width).tokens_per_second

    single = chosen.decoding(SEQUENCE_TOKENS).better_tokens_per_second
    best, best_rate = chosen, _MIN_GAIN * throughput(chosen)
    for kv_tokens in _capacities(chosen.memory_plan.kv_tokens, options.max_num_seqs):
        shape = replace(chosen.memory_plan.shape, kv_tokens=kv_tokens)
        if not search.memory_planner.can_share_kv(shape):
            break
        with suppress(BudgetExceeded):
            plan = search.try_shape(total_bytes, shape)
            alone = plan.decoding(SEQUENCE_TOKENS).better_tokens_per_second
            rate = throughput(plan)
            if alone >= _MIN_SPEED_SHARE * single and rate > best_rate:
                best, best_rate = plan, rate
    return best


def _capacities(minimum: int, num_seqs: int) -> list[int]:
    """Return capacities above the minimum, up to that of all sequences, the smallest first."""
    limit = num_seqs * SEQUENCE_TOKENS
    if limit <= minimum:
        return []
    num_steps = max(1, min(_NUM_STEPS, (limit - minimum) // SEQUENCE_TOKENS))
    step = (limit - minimum) / num_steps
    return [minimum + round(step * (i + 1)) for i in range(num_steps)]
