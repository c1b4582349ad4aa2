"""The outcome of planning: memory by name, residency of the layers, predicted speed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from offload.budget import format_up
from offload.plan import ResidencyPlan
from offload.units import GIB, format_bytes
from specdec.policy import PassCost, level_seconds

ASSUMED_TOKENS_PER_PASS = 3.5
"""For predictions only: what a decent draft reaches before anything is measured."""


@dataclass(frozen=True)
class RunPlan:
    """What goes where, and how fast that should be."""

    budget_bytes: int
    budget_source: str
    parts: tuple[tuple[str, int], ...]
    """(name, bytes) of everything in the budget; they sum to it."""
    residency: ResidencyPlan
    """Of the target's layers."""
    ctx_size: int
    n_draft_tokens: int
    pass_cost: PassCost
    storage_bytes_per_second: float
    smallest_budget_bytes: int
    draft_residency: ResidencyPlan | None = None
    draft_cost: PassCost | None = None
    """Of one level of a draft tree; None without a draft model."""
    draft_depth: int = 0
    uses_mmap: bool = False
    """The target's weights are left to the page cache and not counted."""
    accept_threshold: float | None = None
    """Draft tokens of this probability are put up with: lossy."""
    warnings: tuple[str, ...] = ()

    @property
    def plain_tokens_per_second(self) -> float:
        return 1.0 / self.pass_cost.seconds(1)

    @property
    def predicted_tokens_per_second(self) -> float:
        """With a draft at ASSUMED_TOKENS_PER_PASS; acceptance is known only after a run."""
        if self.draft_cost is None:
            return self.plain_tokens_per_second
        drafting = self.draft_depth * level_seconds(self.draft_cost, self.n_draft_tokens)
        # A tree of that depth emits at most a token per level and the target's own.
        tokens = min(ASSUMED_TOKENS_PER_PASS, 1 + min(self.draft_depth, self.n_draft_tokens))
        return tokens / (self.pass_cost.seconds(1 + self.n_draft_tokens) + drafting)

    def to_dict(self) -> dict[str, Any]:
        residency, draft = self.residency, self.draft_residency
        return {
            "memory_budget_bytes": self.budget_bytes,
            "memory_budget_source": self.budget_source,
            "smallest_budget_bytes": self.smallest_budget_bytes,
            "memory": dict(self.parts),
            "ctx_size": self.ctx_size,
            "uses_mmap": self.uses_mmap,
            "n_layers": len(residency.layers),
            "n_streamed_layers": residency.n_streamed_layers,
            "n_slots": residency.n_slots,
            "slot_bytes": residency.slot_bytes,
            "streamed_bytes_per_pass": residency.streamed_bytes,
            "draft_streamed_bytes_per_pass": 0 if draft is None else draft.streamed_bytes,
            "storage_bytes_per_second": self.storage_bytes_per_second,
            "num_draft_tokens": self.n_draft_tokens,
            "draft_depth": self.draft_depth,
            "pass_cost": asdict(self.pass_cost),
            "draft_cost": None if self.draft_cost is None else asdict(self.draft_cost),
            "plain_tokens_per_second": self.plain_tokens_per_second,
            "predicted_tokens_per_second": self.predicted_tokens_per_second,
            "is_lossless": self.accept_threshold is None,
            "accept_threshold": self.accept_threshold,
            "warnings": list(self.warnings),
        }

    def lines(self) -> list[str]:
        """For the user, one fact a line."""
        width = max(len(name) for name, _ in self.parts)
        lines = [f"memory budget {format_bytes(self.budget_bytes)} ({self.budget_source})"]
        lines += [f"  {name:<{width}}  {format_bytes(n):>11}" for name, n in self.parts if n]
        if self.uses_mmap:
            lines.append("the target's weights are read through the page cache and not counted")
        else:
            lines.append(_residency_line(self.residency))
        if self.draft_residency is not None and self.draft_residency.n_streamed_layers:
            lines.append("draft: " + _residency_line(self.draft_residency))
        if self.residency.n_streamed_layers:
            lines += self._speed_lines()
        lines.append(f"smallest budget that works {_exact(self.smallest_budget_bytes)}")
        if self.accept_threshold is not None:
            lines.append(
                f"LOSSY: draft tokens of probability {self.accept_threshold:g} and above may "
                "replace the target's own (--accept-threshold)"
            )
        return lines + [f"warning: {warning}" for warning in self.warnings]

    def _speed_lines(self) -> list[str]:
        """Of a target that streams: what computing alone costs is known less well."""
        n_rows = 1 + self.n_draft_tokens
        passes = (
            f"storage {self.storage_bytes_per_second / 1e9:.2f} GB/s; a pass of 1 token takes "
            f"{self.pass_cost.seconds(1):.2f} s, of {n_rows} tokens "
            f"{self.pass_cost.seconds(n_rows):.2f} s"
        )
        speed = f"predicted {self.plain_tokens_per_second:.2f} tokens/s plain"
        if self.draft_cost is None:
            return [passes, speed]
        speed += (
            f", {self.predicted_tokens_per_second:.2f} tokens/s with the draft "
            f"(assuming {ASSUMED_TOKENS_PER_PASS} tokens per pass)"
        )
        return [passes, speed]


def _exact(n_bytes: int) -> str:
    """Enough when typed in; beside it what is easier to read."""
    readable = f" ({format_bytes(n_bytes)})" if n_bytes >= GIB else ""
    return format_up(n_bytes) + readable


def _residency_line(residency: ResidencyPlan) -> str:
    n_layers, n_streamed = len(residency.layers), residency.n_streamed_layers
    line = f"{n_layers - n_streamed} of {n_layers} layers wholly in memory"
    if not n_streamed:
        return line
    return (
        f"{line}; {format_bytes(residency.streamed_bytes)} streamed per pass "
        f"through {residency.n_slots} slots of {format_bytes(residency.slot_bytes)}"
    )
