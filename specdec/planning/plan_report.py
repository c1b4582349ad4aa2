"""A plan in lines for the user: the budget's parts, where the layers are, what was compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from backends.contract.exactness import Exactness
from offload.budget import MemoryBudget, format_up
from offload.residency.experts import ExpertRoom
from offload.residency.placement import Placement
from offload.units import GIB, format_bytes
from specdec.planning.memory.lending import TEXT_TOKENS
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


def placement_line(placed: Placement) -> str:
    n_layers, n_streamed = len(placed.layers), placed.n_streamed_layers
    if not placed.is_on_device:
        line = f"{n_layers - n_streamed} of {n_layers} layers wholly in memory"
    else:
        line = f"{format_bytes(placed.device_layout.n_bytes)} of the layers in the GPU's memory"
        if placed.n_moving_layers:
            line += (
                f", {format_bytes(placed.resident_bytes)} pinned in the host's; "
                f"{format_bytes(placed.moved_bytes)} copied per pass through "
                f"{placed.n_device_slots} slots of {format_bytes(placed.device_slot_bytes)}"
            )
    if not n_streamed:
        return line
    return (
        f"{line}; {format_bytes(placed.streamed_bytes)} streamed per pass "
        f"through {placed.n_slots} slots of {format_bytes(placed.slot_bytes)}"
    )


def lending_line(placed: Placement, decoding: Placement) -> str:
    """decoding: the same while a text is decoded."""
    n_held = placed.n_streamed_layers - decoding.n_streamed_layers
    lent = placed.streamed_bytes - decoding.streamed_bytes
    return (
        f"while a text of {TEXT_TOKENS} tokens is decoded, unused memory should hold {n_held} more "
        f"({format_bytes(lent)}): {format_bytes(decoding.streamed_bytes)} streamed per pass"
    )


def expert_line(room: ExpertRoom) -> str:
    held = f"{room.n_slots} of {room.n_experts} experts in memory ({format_bytes(room.n_bytes)})"
    if room.holds_all:
        return held
    more = replace(room, n_slots=min(2 * room.n_slots, room.n_experts))
    return f"{held}, {_found(room)}; with {format_bytes(more.n_bytes)} for them {_found(more)}"


def _found(room: ExpertRoom) -> str:
    return (
        f"expected to be {room.hit_rate:.0%} of those asked for, "
        f"{format_bytes(int(room.bytes_per_token))} read for a token"
    )


def speed_lines(chosen: Alternative) -> list[str]:
    """Of a target whose weights move: what computing alone costs is known less well."""
    target, n_rows = chosen.target, 1 + chosen.n_tree
    link = f"copies to the GPU {target.copy_bytes_per_second / 1e9:.2f} GB/s; "
    missing = f"missing experts {target.expert_bytes_per_second / 1e9:.2f} GB/s; "
    room = target.placement.experts
    passes = (
        f"storage {target.storage_bytes_per_second / 1e9:.2f} GB/s; "
        f"{'' if room is None or room.holds_all else missing}"
        f"{link if target.placement.is_on_device else ''}a pass of 1 token "
        f"takes {_figure(target.seconds(1))} s"
    )
    if n_rows > 1:
        passes += f", of {n_rows} tokens {_figure(target.seconds(n_rows))} s"
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
    ranked = sorted(alternatives, key=lambda one: -one.tokens_per_second)
    width = max(len(one.name) for one in ranked) + 2
    lines = [f"{_HEADINGS[0]:<{width}}" + "".join(f"{title:>10}" for title in _HEADINGS[1:])]
    for one in ranked:
        mark = "* " if one is chosen else "  "
        figures = (
            f"{_figure(one.target.placement.moved_bytes / 1e9):>10}",
            f"{_figure(one.target.seconds(1)):>10}",
            f"{_figure(one.target.seconds(1 + one.n_tree)):>10}",
            f"{one.tokens_per_second:10.2f}",
        )
        lines.append(f"{mark + one.name:<{width}}" + "".join(figures))
    if ranked[0] is not chosen:
        lines.append(_WHY_NOT_THE_FASTEST)
    return lines
