"""What goes where in memory, before anything large is allocated.

The budget is the whole process's. From it come off, in this order: what the process takes already
(measured), headroom for what libraries allocate, the draft, the target's embeddings and head, the
KV caches and the activations. What is left holds decoder layers: a ring of slots through which they
stream, and as many pinned ones as fit.
"""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.compute import ComputeProfile, measure_compute
from backends.hf_model import HfModel, load_hf_model
from backends.kv_cache import BLOCK_ROWS
from backends.torch_cpu import activation_bytes
from offload.budget import BudgetExceeded, MemoryBudget, format_up
from offload.memory import memory_limit, process_memory
from offload.plan import ResidencyPlan, plan_residency
from offload.profile import measure_storage
from offload.reading import resident_footprint
from offload.units import MIB, format_bytes, parse_bytes
from specdec.config import SpecConfig
from specdec.models import resolve_model
from specdec.policy import MAX_AUTO_NODES, DraftPolicy, PassCost

if TYPE_CHECKING:
    from offload.profile import DeviceProfile

DEFAULT_CTX_SIZE = 2048
HEADROOM_BYTES = 192 * MIB
"""Scratch of matrix products, tokenizer, thread stacks, allocator slack: docs/memory.md."""
ASSUMED_TOKENS_PER_PASS = 3.5
"""For predictions only: what a decent draft reaches before anything is measured."""


@dataclass(frozen=True)
class RunOptions:
    """What a run is loaded with; the keywords of `specdec.load`."""

    model: str | Path
    draft_model: str | Path | None = None
    memory_budget: str | int = "auto"
    ctx_size: int | None = None
    threads: int | None = None
    prefetch_depth: int | None = None
    io_threads: int | None = None
    spec: SpecConfig = SpecConfig()

    @property
    def max_nodes(self) -> int:
        """Most rows that a pass may have."""
        if not self.spec.spec_type:
            return 1
        n_drafted = self.spec.num_draft_tokens
        return 1 + (MAX_AUTO_NODES if n_drafted is None else n_drafted)


@dataclass(frozen=True)
class RunPlan:
    """The outcome: memory by name, residency of the layers, predicted speed."""

    budget_bytes: int
    budget_source: str
    parts: tuple[tuple[str, int], ...]
    """(name, bytes) of everything in the budget; they sum to it."""
    residency: ResidencyPlan
    ctx_size: int
    n_draft_tokens: int
    pass_cost: PassCost
    storage_bytes_per_second: float
    smallest_budget_bytes: int
    has_draft: bool

    @property
    def plain_tokens_per_second(self) -> float:
        return 1.0 / self.pass_cost.seconds(1)

    @property
    def predicted_tokens_per_second(self) -> float:
        """With a draft at ASSUMED_TOKENS_PER_PASS; acceptance is known only after a run."""
        if not self.has_draft:
            return self.plain_tokens_per_second
        return ASSUMED_TOKENS_PER_PASS / self.pass_cost.seconds(1 + self.n_draft_tokens)

    def to_dict(self) -> dict[str, Any]:
        residency = self.residency
        return {
            "memory_budget_bytes": self.budget_bytes,
            "memory_budget_source": self.budget_source,
            "smallest_budget_bytes": self.smallest_budget_bytes,
            "memory": dict(self.parts),
            "ctx_size": self.ctx_size,
            "n_layers": len(residency.layers),
            "n_streamed_layers": residency.n_streamed_layers,
            "n_slots": residency.n_slots,
            "slot_bytes": residency.slot_bytes,
            "streamed_bytes_per_pass": residency.streamed_bytes,
            "storage_bytes_per_second": self.storage_bytes_per_second,
            "num_draft_tokens": self.n_draft_tokens,
            "pass_cost": asdict(self.pass_cost),
            "plain_tokens_per_second": self.plain_tokens_per_second,
            "predicted_tokens_per_second": self.predicted_tokens_per_second,
        }

    def lines(self) -> list[str]:
        residency = self.residency
        n_layers, n_streamed = len(residency.layers), residency.n_streamed_layers
        width = max(len(name) for name, _ in self.parts)
        lines = [f"memory budget {format_bytes(self.budget_bytes)} ({self.budget_source})"]
        lines += [f"  {name:<{width}}  {format_bytes(n):>11}" for name, n in self.parts if n]
        lines.append(
            f"{n_layers - n_streamed} of {n_layers} layers wholly in memory; "
            f"{format_bytes(residency.streamed_bytes)} streamed per pass "
            f"through {residency.n_slots} slots of {format_bytes(residency.slot_bytes)}"
        )
        lines.append(
            f"storage {self.storage_bytes_per_second / 1e9:.2f} GB/s; a pass of 1 token takes "
            f"{self.pass_cost.seconds(1):.2f} s, of {1 + self.n_draft_tokens} tokens "
            f"{self.pass_cost.seconds(1 + self.n_draft_tokens):.2f} s"
        )
        speed = f"predicted {self.plain_tokens_per_second:.2f} tokens/s plain"
        if self.has_draft:
            speed += (
                f", {self.predicted_tokens_per_second:.2f} tokens/s with the draft "
                f"(assuming {ASSUMED_TOKENS_PER_PASS} tokens per pass)"
            )
        lines.append(speed)
        lines.append(f"smallest budget that works {format_up(self.smallest_budget_bytes)}")
        return lines


@dataclass(frozen=True)
class PlannedModels:
    """A plan, and the models (without weights) that it was made for."""

    plan: RunPlan
    target: HfModel
    target_directory: Path
    draft: HfModel | None
    draft_directory: Path | None


def plan_run(model: str | Path, draft_model: str | Path | None = None, **options: Any) -> RunPlan:
    """The plan of `specdec.load` with the same arguments; loads no weights.

    Raises BudgetExceeded, ModelNotFound, CheckpointError, UnsupportedModel.
    """
    from specdec.api import run_options

    return plan_models(run_options(model, draft_model, **options)).plan


def plan_models(options: RunOptions) -> PlannedModels:
    """Read the models' headers, measure the machine, and divide the budget."""
    directory = resolve_model(options.model)
    draft_directory = None if options.draft_model is None else resolve_model(options.draft_model)
    target = load_hf_model(directory)
    draft = None if draft_directory is None else load_hf_model(draft_directory)
    compute = measure_compute(target.dtype)
    storage = measure_storage(target.layer_tensors[0][0].record.path)
    gc.collect()  # what building the models left behind is not the process's base
    ctx_size = min(options.ctx_size or DEFAULT_CTX_SIZE, target.max_context)
    total_bytes, source = _budget(options.memory_budget)
    budget = MemoryBudget(total_bytes, process_memory().rss_bytes, HEADROOM_BYTES)
    residency, smallest = _divide(budget, target, draft, ctx_size, options)
    plan = _assemble(options, budget, source, residency, smallest, target, compute, storage, draft)
    return PlannedModels(plan, target, directory, draft, draft_directory)


def _budget(memory_budget: str | int) -> tuple[int, str]:
    limit = memory_limit()
    if memory_budget == "auto":
        return limit.n_bytes, limit.source
    wanted = parse_bytes(memory_budget)
    if wanted > limit.n_bytes:
        raise BudgetExceeded("the memory budget itself", wanted, limit.n_bytes, wanted)
    return wanted, "as asked"


def _divide(
    budget: MemoryBudget,
    target: HfModel,
    draft: HfModel | None,
    ctx_size: int,
    options: RunOptions,
) -> tuple[ResidencyPlan, int]:
    """Reserve every part by name; the layers get what is left. Also the smallest budget."""
    n_rows = -(-(ctx_size + options.max_nodes) // BLOCK_ROWS) * BLOCK_ROWS
    parts = {
        "target embeddings and head": resident_footprint(target.outer_records),
        "target KV cache": n_rows * target.kv_bytes_per_token,
        "activations": activation_bytes(target, ctx_size, options.max_nodes),
    }
    if draft is not None:
        records = (*draft.outer_records, *(r for x in draft.layer_weights for r in x.tensors))
        parts["draft weights"] = resident_footprint(records)
        parts["draft KV cache"] = n_rows * draft.kv_bytes_per_token
    fixed = budget.base_bytes + budget.headroom_bytes + sum(parts.values())
    layers, n_slots = target.layer_weights, options.prefetch_depth
    smallest = fixed + plan_residency(layers, 1 << 62, n_slots=n_slots).smallest_bytes
    if smallest > budget.total_bytes:
        raise BudgetExceeded("this run", smallest, budget.total_bytes, smallest)
    for name, n_bytes in parts.items():
        budget.reserve(name, n_bytes)
    residency = plan_residency(layers, budget.available_bytes, n_slots=n_slots)
    budget.reserve("pinned layers", residency.resident_bytes)
    budget.reserve("ring", residency.ring_bytes)
    return residency, smallest


def _assemble(
    options: RunOptions,
    budget: MemoryBudget,
    source: str,
    residency: ResidencyPlan,
    smallest: int,
    target: HfModel,
    compute: ComputeProfile,
    storage: DeviceProfile,
    draft: HfModel | None,
) -> RunPlan:
    layer_bytes = sum(r.n_bytes for layer in residency.layers for r in layer.tensors)
    head_bytes = target.vocab_size * target.config.hidden_size * target.dtype.itemsize
    cost = PassCost(
        read_seconds=residency.streamed_bytes / storage.storage_bytes_per_second,
        row_free_seconds=compute.seconds_per_byte * (layer_bytes + head_bytes),
        seconds_per_row=compute.seconds_per_byte_row * (layer_bytes + head_bytes),
    )
    ctx_size = min(options.ctx_size or DEFAULT_CTX_SIZE, target.max_context)
    policy = DraftPolicy(options.spec, cost, ctx_size)
    return RunPlan(
        budget_bytes=budget.total_bytes,
        budget_source=source,
        parts=tuple(budget.table()),
        residency=residency,
        ctx_size=ctx_size,
        n_draft_tokens=policy.n_nodes if options.spec.spec_type else 0,
        pass_cost=cost,
        storage_bytes_per_second=storage.storage_bytes_per_second,
        smallest_budget_bytes=smallest,
        has_draft=draft is not None and "draft" in options.spec.spec_type,
    )
