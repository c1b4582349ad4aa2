"""The outcome of planning: memory by name, placement of the layers, predicted speed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from backends.contract.exactness import EXACT_OFF, Exactness
from backends.contract.source import KvSplit
from offload.budget import MEMORY
from offload.placement.placement import Placement
from offload.placement.tiers import CUDA_CONTEXT_BYTES, VRAM
from specdec.config import DEFAULT_TREE_WIDTH
from specdec.metrics.renamed import RenamedFields, with_old_names
from specdec.planning.memory.pinnable import SEQUENCE_TOKENS
from specdec.planning.memory.planner import MemoryPlanner
from specdec.planning.plan_report import (
    alternatives_table,
    enough,
    exactness_line,
    expert_line,
    kv_lines,
    memory_table,
    overhead_bytes,
    pinning_line,
    placement_line,
    speed_lines,
)
from specdec.planning.search import Alternative
from specdec.policy.cost_model import CostModel
from specdec.run_options import CPU, CUDA


@dataclass(frozen=True)
class RunPlan(RenamedFields):
    """The plan of a run: memory, placement of the layers, and predicted speed."""

    budget_source: str
    chosen: Alternative
    alternatives: tuple[Alternative, ...]
    """All memory plans that were predicted, the chosen one among them."""
    exactness: Exactness = EXACT_OFF
    """Exactness of the target on its device."""
    cache_types: tuple[str, str] = ("", "")
    """Number formats of the keys and values in the target's KV cache."""
    uses_mmap: bool = False
    """Whether the target's weights are left to the page cache and not counted."""
    accept_threshold: float | None = None
    """Probability from which draft tokens are accepted (lossy); None is lossless."""
    tree_width: int = DEFAULT_TREE_WIDTH
    """Maximum number of branches below one token of a tree."""
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Remarks where the plan differs from what the options suggest."""
    vram_source: str = ""
    """Origin of the VRAM budget; empty without a GPU."""
    max_num_seqs: int = 1
    """Maximum sequences that are computed together."""

    @property
    def device(self) -> str:
        """The device that computes the target."""
        return CPU if self.chosen.memory_plan.vram is None else CUDA

    @property
    def draft_device(self) -> str:
        """The device that computes the draft model; the CPU where there is none."""
        return self.chosen.memory_plan.shape.draft_device or CPU

    @property
    def vram_budget_bytes(self) -> int:
        """GPU memory of the run; 0 without a GPU."""
        vram = self.chosen.memory_plan.vram
        return 0 if vram is None else vram.total_bytes

    @property
    def torch_vram_bytes(self) -> int:
        """VRAM that torch's allocator may reserve: all but the driver's context."""
        return max(0, self.vram_budget_bytes - CUDA_CONTEXT_BYTES)

    @property
    def budget_bytes(self) -> int:
        return self.chosen.memory_plan.budget.total_bytes

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """(name, bytes) of everything in the budget; they sum to it."""
        return tuple(self.chosen.memory_plan.budget.table())

    @property
    def placement(self) -> Placement:
        """Placement of the target's layers."""
        return self.chosen.memory_plan.target

    @property
    def draft_placement(self) -> Placement | None:
        return self.chosen.memory_plan.draft

    @property
    def ctx_size(self) -> int:
        return self.chosen.memory_plan.ctx_size

    @property
    def kv_tokens(self) -> int:
        """Capacity of the target's KV cache, in tokens of all sequences together."""
        return self.chosen.memory_plan.kv_tokens

    @property
    def kv_token_bytes(self) -> int:
        """Bytes that KV of one token takes from layers, of both models; 0 where none streams."""
        parts = dict(self.parts)
        if not self.chosen.memory_plan.pinnable.slot_bytes:
            return 0
        kv_bytes = parts["target KV cache"] + parts.get("draft KV cache", 0)
        split = self.kv_split
        return kv_bytes // (self.kv_tokens if split is None else split.hot_tokens)

    @property
    def kv_split(self) -> KvSplit | None:
        """Part of the target's KV cache that is in memory; None: all of it."""
        return self.chosen.memory_plan.shape.kv_split

    @property
    def max_prompt_tokens(self) -> int:
        """Maximum prompt tokens of a pass that memory is reserved for."""
        return self.ctx_size if self.kv_split is None else self.kv_split.prompt_tokens

    @property
    def kv_bytes_per_pass(self) -> int:
        """Bytes of KV that a pass reads from the KV file at the end of a whole context."""
        return sum(self.chosen.at_whole_context.target.kv_read_bytes)

    @property
    def n_draft_tokens(self) -> int:
        """Draft tokens of the largest tree that memory is reserved for."""
        return self.chosen.memory_plan.n_drafted

    @property
    def smallest_budget_bytes(self) -> int:
        """The smallest budget that works for the run as planned, with or without the draft."""
        return self.chosen.memory_plan.smallest.host_bytes

    def with_smallest_of(self, planner: MemoryPlanner) -> RunPlan:
        """Return the plan with the smallest budgets of another choice of options."""
        memory_plan, alone = self.chosen.memory_plan, planner.smallest_alone
        smallest = alone if memory_plan.draft is None else planner.smallest
        smallest = smallest.at_most(self.budget_bytes)
        memory_plan = replace(memory_plan, smallest=smallest, smallest_alone=alone)
        chosen = replace(self.chosen, memory_plan=memory_plan)
        compared = [chosen if item is self.chosen else item for item in self.alternatives]
        return replace(self, chosen=chosen, alternatives=tuple(compared))

    @property
    def smallest_without_draft_bytes(self) -> int:
        """The smallest budget that works without a draft model."""
        return self.chosen.memory_plan.smallest_alone.host_bytes

    @property
    def storage_bytes_per_second(self) -> float:
        return self.chosen.target.storage_bytes_per_second

    @cached_property
    def decoding(self) -> Alternative:
        """The chosen plan while SEQUENCE_TOKENS are decoded; its speeds are reported."""
        return self.chosen.decoding(SEQUENCE_TOKENS)

    @property
    def pinnable_bytes(self) -> int:
        """Bytes of streamed layers that should fit in unused memory while decoding."""
        return self.placement.streamed_bytes - self.decoding.target.placement.streamed_bytes

    @cached_property
    def cost_model(self) -> CostModel:
        """Predicted cost of the target's passes without opportunistically pinned layers."""
        return self.chosen.target.cost_model()

    @cached_property
    def draft_cost_model(self) -> CostModel | None:
        """Predicted cost of the draft's passes, one per tree level; None without a draft model."""
        return None if self.chosen.draft is None else self.chosen.draft.cost_model()

    def pass_seconds(self, num_tokens: int) -> float:
        """Return the predicted seconds of a pass that immediately follows another."""
        return self.decoding.target.seconds(num_tokens)

    @property
    def plain_tokens_per_second(self) -> float:
        return self.decoding.plain_tokens_per_second

    @property
    def predicted_tokens_per_second(self) -> float:
        """Tokens per second with the draft, for an assumed acceptance rate; of plain decoding where
        that is faster, as the policy decides at every step."""
        if self.chosen.draft is None:
            return self.plain_tokens_per_second
        return self.decoding.better_tokens_per_second

    @property
    def does_draft_pay(self) -> bool:
        """Whether the prediction is that of a draft model, and not of plain decoding."""
        return self.predicted_tokens_per_second > self.plain_tokens_per_second

    def to_dict(self) -> dict[str, Any]:
        placement, draft = self.placement, self.draft_placement
        draft_cost = self.draft_cost_model
        return {
            "memory_budget_bytes": self.budget_bytes,
            "memory_budget_source": self.budget_source,
            "smallest_budget_bytes": self.smallest_budget_bytes,
            "smallest_without_draft_bytes": self.smallest_without_draft_bytes,
            "memory": dict(self.parts),
            "overhead_bytes": overhead_bytes(self.chosen.memory_plan.budget),
            "device": self.device,
            "draft_device": self.draft_device if self.chosen.draft is not None else None,
            **self._vram_dict(),
            **self._expert_dict(),
            "ctx_size": self.ctx_size,
            "kv_tokens": self.kv_tokens,
            "cache_type_k": self.cache_types[0],
            "cache_type_v": self.cache_types[1],
            "uses_mmap": self.uses_mmap,
            "n_layers": len(placement.layers),
            "n_streamed_layers": placement.n_streamed_layers,
            "n_slots": placement.n_slots,
            "slot_bytes": placement.slot_bytes,
            "streamed_bytes_per_pass": placement.streamed_bytes,
            "hot_kv_tokens": self.kv_tokens if self.kv_split is None else self.kv_split.hot_tokens,
            "max_prompt_tokens": self.max_prompt_tokens,
            "kv_bytes_per_pass": self.kv_bytes_per_pass,
            **with_old_names({"pinnable_bytes": self.pinnable_bytes}),
            "draft_streamed_bytes_per_pass": 0 if draft is None else draft.streamed_bytes,
            "storage_bytes_per_second": self.storage_bytes_per_second,
            "num_draft_tokens": self.n_draft_tokens,
            "draft_depth": self.chosen.depth if self.chosen.draft is not None else 0,
            "pass_cost": self.cost_model.to_dict(),
            "draft_cost": draft_cost and draft_cost.to_dict(),
            "plain_tokens_per_second": self.plain_tokens_per_second,
            "predicted_tokens_per_second": self.predicted_tokens_per_second,
            "is_lossless": self.accept_threshold is None,
            "is_exact": self.exactness.is_exact,
            "not_exact_because": self.exactness.reason or None,
            "accept_threshold": self.accept_threshold,
            "assumed_tokens_per_pass": self.chosen.tokens_per_pass,
            "chosen": self.alternatives.index(self.chosen),
            "weighed": [alternative.to_dict() for alternative in self.alternatives],
            "warnings": list(self.warnings),
            "notes": list(self.notes),
        }

    def _expert_dict(self) -> dict[str, Any]:
        """Return the entries for a mixture whose experts are cached; empty for other models."""
        expert_cache = self.placement.experts
        if expert_cache is None:
            return {}
        return {
            "n_experts": expert_cache.n_experts,
            "n_expert_slots": expert_cache.n_slots,
            "expert_slot_bytes": expert_cache.slot_bytes,
            "expected_expert_hit_rate": expert_cache.hit_rate,
            "expected_expert_bytes_per_token": expert_cache.bytes_per_token,
            "expert_bytes_per_second": self.chosen.target.expert_bytes_per_second,
        }

    def _vram_dict(self) -> dict[str, Any]:
        """Return the entries for a target on a GPU; empty on the CPU."""
        placement, memory_plan = self.placement, self.chosen.memory_plan
        if memory_plan.vram is None:
            return {}
        return {
            "vram_budget_bytes": self.vram_budget_bytes,
            "vram_budget_source": self.vram_source,
            "smallest_vram_bytes": memory_plan.smallest.vram_bytes,
            "vram": dict(memory_plan.vram.table()),
            "n_copied_layers": placement.n_moving_layers,
            "n_device_slots": placement.n_device_slots,
            "device_slot_bytes": placement.device_slot_bytes,
            "device_resident_bytes": placement.device_resident_bytes,
            "pinned_resident_bytes": placement.resident_bytes,
            "copied_bytes_per_pass": placement.moved_bytes,
            "copy_bytes_per_second": self.chosen.target.copy_bytes_per_second,
        }

    def lines(self) -> list[str]:
        """Return the plan for the user, one fact per line."""
        memory_plan, draft = self.chosen.memory_plan, self.draft_placement
        vram = memory_plan.vram
        lines = memory_table(memory_plan.budget, "memory budget", self.budget_source)
        if vram is not None:
            lines += memory_table(vram, "VRAM budget", self.vram_source)
        lines += kv_lines(self.cache_types, self.chosen)
        if self.uses_mmap:
            lines.append("the target's weights are read through the page cache and not counted")
        else:
            lines.append(placement_line(self.placement))
            if self.placement.experts is not None:
                lines.append(expert_line(self.placement.experts))
        if draft is not None and draft.n_streamed_layers:
            lines.append("draft: " + placement_line(draft))
        if vram is not None and self.chosen.draft is not None:
            lines.append(f"draft: computed on the {'GPU' if self.draft_device == CUDA else 'CPU'}")
        if self.placement.n_moving_layers:
            if self.pinnable_bytes:
                lines.append(pinning_line(self.placement, self.decoding.target.placement))
            lines += speed_lines(self.decoding)
            lines += alternatives_table(self.alternatives, self.chosen)
        lines.append(exactness_line(self.exactness))
        lines.append(self._smallest_line(MEMORY, "smallest budget that works"))
        if vram is not None:
            lines.append(self._smallest_line(VRAM, "smallest VRAM budget that works"))
        if self.accept_threshold is not None:
            lines.append(
                f"LOSSY: draft tokens of probability {self.accept_threshold:g} and above may "
                "replace the target's own (--accept-threshold)"
            )
        lines += [f"note: {note}" for note in self.notes]
        return lines + [f"warning: {warning}" for warning in self.warnings]

    def _smallest_line(self, ledger: str, title: str) -> str:
        memory_plan = self.chosen.memory_plan
        n_bytes, alone = memory_plan.smallest.of(ledger), memory_plan.smallest_alone.of(ledger)
        line = f"{title} {enough(n_bytes)}"
        return f"{line}; without the draft {enough(alone)}" if alone < n_bytes else line
