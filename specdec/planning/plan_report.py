"""Report of a plan for the user: parts of the budget, layer placement, compared plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from backends.contract.exactness import Exactness
from offload.budget import MemoryBudget, format_up
from offload.placement.experts import ExpertCachePlan
from offload.placement.placement import Placement
from offload.units import GIB, format_bytes
from specdec.planning.memory.pinnable import SEQUENCE_TOKENS
from specdec.planning.search import Alternative

_WHY_NOT_THE_FASTEST = (
    "* is the plan that was chosen; it may be slower than the first row, because room for larger "
    "trees may cost 5 %, a draft that was asked for stays, and KV cache for more sequences holds "
    "layers until they run"
)
_WHOLE_CACHE_TYPES = ("f32", "f16", "bf16")
_HEADINGS = ("weighed", "GB/pass", "s, 1 token", "s, tree", "tokens/s")


_OF_MODELS = (
    "embeddings and head",
    "KV cache",
    "recurrent states",
    "pinned layers",
    "ring",
    "expert cache",
)
"""Suffixes of the names of parts that hold weights or keys and values."""


def overhead_bytes(budget: MemoryBudget) -> int:
    """Return the bytes of neither weights nor KV cache: libraries, activations, reserves.

    Free memory is not among them: while a sequence is decoded, it pins layers
    (specdec/policy/opportunistic_layers).
    """
    parts = (item for item in budget.table() if item[0] != "available")
    return sum(n_bytes for name, n_bytes in parts if not name.endswith(_OF_MODELS))


def memory_table(budget: MemoryBudget, title: str, source: str) -> list[str]:
    """Return lines with the non-empty parts of a budget. source: origin of its total."""
    parts = budget.table()
    width = max(len(name) for name, _ in parts)
    lines = [f"{title} {format_bytes(budget.total_bytes)} ({source})"]
    lines += [f"  {name:<{width}}  {format_bytes(n):>11}" for name, n in parts if n]
    overhead = overhead_bytes(budget)
    share = overhead / budget.total_bytes
    return [
        *lines,
        f"libraries, activations and reserves: {format_bytes(overhead)}, {share:.0%} of the budget",
    ]


def kv_lines(cache_types: tuple[str, str], chosen: Alternative) -> list[str]:
    """Return lines on a KV cache that rounds keys or values to fewer than 16 bits, or that is
    partly in a file; none for others."""
    split_lines = [] if chosen.memory_plan.stored_kv is None else [_split_line(chosen)]
    return [*_cache_type_lines(cache_types), *split_lines]


def _cache_type_lines(cache_types: tuple[str, str]) -> list[str]:
    if set(cache_types) <= {"", *_WHOLE_CACHE_TYPES}:
        return []
    keys, values = cache_types
    return [
        f"KV cache: keys in {keys}, values in {values}; output is that of plain decoding with them"
    ]


def exactness_line(exactness: Exactness) -> str:
    if exactness.is_exact:
        return "exact to the bit: a token's logits depend on the tokens before it alone"
    return f"not exact to the bit: {exactness.reason}"


def enough(n_bytes: int) -> str:
    """Format a size that is enough when typed in, and from 1 GiB a readable one beside it."""
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


def _split_line(chosen: Alternative) -> str:
    """Describe a KV cache that is partly in a file, and a pass at the end of a whole context."""
    memory_plan, whole = chosen.memory_plan, chosen.at_whole_context
    split = memory_plan.shape.kv_split
    assert split is not None, "the KV cache is split"
    kv_bytes = sum(whole.target.kv_read_bytes)
    return (
        f"KV cache: {split.hot_tokens} of {memory_plan.kv_tokens} tokens in memory, the others in "
        f"a file; at the end of a context of {memory_plan.ctx_size} tokens a pass reads "
        f"{format_bytes(kv_bytes)} of KV and {format_bytes(whole.target.placement.streamed_bytes)} "
        f"of weights, and one of 1 token takes {_format_figure(whole.target.seconds(1))} s; a "
        f"prompt takes a pass for each {split.prompt_tokens} tokens"
    )


def pinning_line(placement: Placement, decoding: Placement) -> str:
    """Describe the layers pinned while decoding. decoding: the placement meanwhile."""
    num_pinned = placement.n_streamed_layers - decoding.n_streamed_layers
    pinnable = placement.streamed_bytes - decoding.streamed_bytes
    return (
        f"while a sequence of {SEQUENCE_TOKENS} tokens is decoded, {num_pinned} more "
        f"({format_bytes(pinnable)}) should fit in unused memory, so that "
        f"{format_bytes(decoding.streamed_bytes)} are streamed per pass"
    )


def expert_line(expert_cache: ExpertCachePlan) -> str:
    cached = (
        f"{expert_cache.n_slots} of {expert_cache.n_experts} experts in memory "
        f"({format_bytes(expert_cache.n_bytes)})"
    )
    if expert_cache.holds_all:
        return cached
    larger = replace(expert_cache, n_slots=min(2 * expert_cache.n_slots, expert_cache.n_experts))
    return (
        f"{cached}, {_expected_hits(expert_cache)}; "
        f"with {format_bytes(larger.n_bytes)} for them {_expected_hits(larger)}"
    )


def _expected_hits(expert_cache: ExpertCachePlan) -> str:
    return (
        f"expected to be {expert_cache.hit_rate:.0%} of those asked for, "
        f"{format_bytes(int(expert_cache.bytes_per_token))} read for a token"
    )


def speed_lines(chosen: Alternative) -> list[str]:
    """Return the speeds of a target whose weights move; without moves they are less well known."""
    target, num_tokens = chosen.target, 1 + chosen.n_tree
    link = f"copies to the GPU {target.copy_bytes_per_second / 1e9:.2f} GB/s; "
    missing = f"missing experts {target.expert_bytes_per_second / 1e9:.2f} GB/s; "
    expert_cache = target.placement.experts
    passes = (
        f"storage {target.storage_bytes_per_second / 1e9:.2f} GB/s; "
        f"{'' if expert_cache is None or expert_cache.holds_all else missing}"
        f"{link if target.placement.is_on_device else ''}a pass of 1 token "
        f"takes {_format_figure(target.seconds(1))} s"
    )
    if num_tokens > 1:
        passes += f", of {num_tokens} tokens {_format_figure(target.seconds(num_tokens))} s"
    speed = f"predicted {chosen.plain_tokens_per_second:.2f} tokens/s plain"
    if chosen.draft is not None:
        speed += (
            f", {chosen.tokens_per_second:.2f} tokens/s with the draft "
            f"(assuming {chosen.tokens_per_pass:.1f} tokens per pass)"
        )
    return [passes, speed]


def _format_figure(value: float) -> str:
    """Format with three significant digits and at least two decimals."""
    n_digits = 2 if value <= 0.0 else max(2, 2 - math.floor(math.log10(value)))
    return f"{value:.{n_digits}f}"


def alternatives_table(alternatives: Sequence[Alternative], chosen: Alternative) -> list[str]:
    """Return a table of the memory plans that were compared, the fastest first."""
    if len(alternatives) < 2:
        return []
    ranked = sorted(alternatives, key=lambda plan: -plan.tokens_per_second)
    drafting = " and the draft's tokens" if chosen.draft is not None else ""
    if not drafting and any(plan.n_tree for plan in ranked):
        drafting = " and draft tokens from n-grams (assumed)"
    about = f"plans that were weighed, with the whole KV cache in use{drafting}:"
    width = max(len(plan.name) for plan in ranked) + 2
    heading = f"{_HEADINGS[0]:<{width}}" + "".join(f"{title:>12}" for title in _HEADINGS[1:])
    lines = [about, heading]
    for plan in ranked:
        mark = "* " if plan is chosen else "  "
        cells = (
            f"{_format_figure(plan.target.placement.moved_bytes / 1e9):>12}",
            f"{_format_figure(plan.target.seconds(1)):>12}",
            f"{_format_figure(plan.target.seconds(1 + plan.n_tree)):>12}",
            f"{plan.tokens_per_second:12.2f}",
        )
        lines.append(f"{mark + plan.name:<{width}}" + "".join(cells))
    if ranked[0] is not chosen:
        lines.append(_WHY_NOT_THE_FASTEST)
    return lines
