"""A plan in lines for the user: the budget's parts, where the layers are, what was compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from backends.contract.exactness import Exactness
from offload.budget import MemoryBudget, format_up
from offload.placement.experts import ExpertCachePlan
from offload.placement.placement import Placement
from offload.units import GIB, format_bytes
from specdec.planning.memory.pinnable import TEXT_TOKENS
from specdec.planning.search import Alternative

_WHY_NOT_THE_FASTEST = (
    "the row with * may be slower than the first one: room for larger trees may cost 1 %, and a "
    "fixed draft is kept"
)
_HEADINGS = ("weighed", "GB/pass", "s, 1 row", "s, tree", "tokens/s")


_OF_MODELS = ("embeddings and head", "KV cache", "pinned layers", "ring", "expert cache")
"""How the parts end that hold weights or keys and values."""


def overhead_bytes(budget: MemoryBudget) -> int:
    """What holds neither weights nor KV cache: libraries, activations, and what is set aside.

    While a text is decoded, what of it is not in use holds layers (specdec/policy/spare_memory).
    """
    return sum(n_bytes for name, n_bytes in budget.table() if not name.endswith(_OF_MODELS))


def memory_table(budget: MemoryBudget, title: str, source: str) -> list[str]:
    """The parts that take something. source: where the budget's figure comes from."""
    parts = budget.table()
    width = max(len(name) for name, _ in parts)
    lines = [f"{title} {format_bytes(budget.total_bytes)} ({source})"]
    lines += [f"  {name:<{width}}  {format_bytes(n):>11}" for name, n in parts if n]
    overhead = overhead_bytes(budget)
    share = overhead / budget.total_bytes
    return [*lines, f"neither weights nor KV cache: {format_bytes(overhead)}, {share:.0%} of it"]


def exactness_line(exactness: Exactness) -> str:
    if exactness.is_exact:
        return "exact to the bit: a token's logits depend on the tokens before it alone"
    return f"not exact to the bit: {exactness.reason}"


def enough(n_bytes: int) -> str:
    """Enough when typed in; beside it what is easier to read."""
    readable = f" ({format_bytes(n_bytes)})" if n_bytes >= GIB else ""
    return format_up(n_bytes) + readable


def placement_line(placement: Placement) -> str:
    n_layers, n_streamed = len(placement.layers), placement.n_streamed_layers
    if not placement.is_on_device:
        line = f"{n_layers - n_streamed} of {n_layers} layers wholly in memory"
    else:
        line = f"{format_bytes(placement.device_layout.n_bytes)} of the layers in the GPU's memory"
        if placement.n_moving_layers:
            line += (
                f", {format_bytes(placement.resident_bytes)} pinned in the host's; "
                f"{format_bytes(placement.moved_bytes)} copied per pass through "
                f"{placement.n_device_slots} slots of {format_bytes(placement.device_slot_bytes)}"
            )
    if not n_streamed:
        return line
    return (
        f"{line}; {format_bytes(placement.streamed_bytes)} streamed per pass "
        f"through {placement.n_slots} slots of {format_bytes(placement.slot_bytes)}"
    )


def pinning_line(placement: Placement, decoding: Placement) -> str:
    """decoding: the same while a text is decoded."""
    num_pinned = placement.n_streamed_layers - decoding.n_streamed_layers
    pinnable = placement.streamed_bytes - decoding.streamed_bytes
    return (
        f"while a text of {TEXT_TOKENS} tokens is decoded, unused memory should hold {num_pinned} more "
        f"({format_bytes(pinnable)}): {format_bytes(decoding.streamed_bytes)} streamed per pass"
    )


def expert_line(expert_cache: ExpertCachePlan) -> str:
    pinned = f"{expert_cache.n_slots} of {expert_cache.n_experts} experts in memory ({format_bytes(expert_cache.n_bytes)})"
    if expert_cache.holds_all:
        return pinned
    more = replace(expert_cache, n_slots=min(2 * expert_cache.n_slots, expert_cache.n_experts))
    return f"{pinned}, {_matched(expert_cache)}; with {format_bytes(more.n_bytes)} for them {_matched(more)}"


def _matched(expert_cache: ExpertCachePlan) -> str:
    return (
        f"expected to be {expert_cache.hit_rate:.0%} of those asked for, "
        f"{format_bytes(int(expert_cache.bytes_per_token))} read for a token"
    )


def speed_lines(chosen: Alternative) -> list[str]:
    """Of a target whose weights move: what computing alone costs is known less well."""
    target, num_tokens = chosen.target, 1 + chosen.n_tree
    link = f"copies to the GPU {target.copy_bytes_per_second / 1e9:.2f} GB/s; "
    missing = f"missing experts {target.expert_bytes_per_second / 1e9:.2f} GB/s; "
    expert_cache = target.placement.experts
    passes = (
        f"storage {target.storage_bytes_per_second / 1e9:.2f} GB/s; "
        f"{'' if expert_cache is None or expert_cache.holds_all else missing}"
        f"{link if target.placement.is_on_device else ''}a pass of 1 token "
        f"takes {_figure(target.seconds(1))} s"
    )
    if num_tokens > 1:
        passes += f", of {num_tokens} tokens {_figure(target.seconds(num_tokens))} s"
    speed = f"predicted {chosen.plain_tokens_per_second:.2f} tokens/s plain"
    if chosen.draft is not None:
        speed += (
            f", {chosen.tokens_per_second:.2f} tokens/s with the draft "
            f"(assuming {chosen.tokens_per_pass:.1f} tokens per pass)"
        )
    return [passes, speed]


def _figure(value: float) -> str:
    """With three digits that count, and at least two behind the point."""
    n_digits = 2 if value <= 0.0 else max(2, 2 - math.floor(math.log10(value)))
    return f"{value:.{n_digits}f}"


def alternatives_table(alternatives: Sequence[Alternative], chosen: Alternative) -> list[str]:
    """The divisions that were compared, the fastest first."""
    if len(alternatives) < 2:
        return []
    ranked = sorted(alternatives, key=lambda item: -item.tokens_per_second)
    width = max(len(item.name) for item in ranked) + 2
    lines = [f"{_HEADINGS[0]:<{width}}" + "".join(f"{title:>10}" for title in _HEADINGS[1:])]
    for item in ranked:
        mark = "* " if item is chosen else "  "
        measurements = (
            f"{_figure(item.target.placement.moved_bytes / 1e9):>10}",
            f"{_figure(item.target.seconds(1)):>10}",
            f"{_figure(item.target.seconds(1 + item.n_tree)):>10}",
            f"{item.tokens_per_second:10.2f}",
        )
        lines.append(f"{mark + item.name:<{width}}" + "".join(measurements))
    if ranked[0] is not chosen:
        lines.append(_WHY_NOT_THE_FASTEST)
    return lines
