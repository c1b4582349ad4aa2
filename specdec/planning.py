"""What goes where in memory, before anything large is allocated.

The budget is the whole process's. From it come off, in this order: what the process takes already
(measured), headroom for what libraries allocate, the draft, the target's embeddings and head, the
KV caches and the activations. What is left holds decoder layers: a ring of slots through which they
stream, and as many pinned tensors as fit.
"""

from __future__ import annotations

import gc
import mmap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from backends.compute import measure_compute
from backends.hf_model import HfModel, load_hf_model
from backends.kv_cache import BLOCK_ROWS
from backends.torch_cpu import activation_bytes
from offload.budget import BudgetExceeded, MemoryBudget, format_up
from offload.memory import memory_limit, process_memory
from offload.plan import ResidencyPlan, plan_residency
from offload.profile import measure_storage
from offload.reading import resident_footprint
from offload.units import MIB, format_bytes, parse_bytes
from specdec.compat import Vocabulary, compare_vocabularies
from specdec.config import ConfigError
from specdec.drafters.model import MAX_BEAMS
from specdec.models import resolve_model
from specdec.options import RunOptions, run_options
from specdec.policy import DraftPolicy, PassCost
from specdec.text import Tokenizer

DEFAULT_CTX_SIZE = 2048
HEADROOM_BYTES = 192 * MIB
"""Scratch of matrix products, thread stacks, allocator slack: docs/memory.md."""
ASSUMED_TOKENS_PER_PASS = 3.5
"""For predictions only: what a decent draft reaches before anything is measured."""
_SMALLEST_STEP_BYTES = 16 * MIB
"""The smallest budget is rounded up to this, since the base differs a little between processes."""


@dataclass(frozen=True)
class ModelFiles:
    """A model before its weights: where it lies, its modules, its tokenizer."""

    directory: Path
    skeleton: HfModel
    tokenizer: Tokenizer

    @classmethod
    def open(cls, name: str | Path) -> ModelFiles:
        directory = resolve_model(name)
        skeleton = load_hf_model(directory)
        return cls(directory, skeleton, Tokenizer.from_pretrained(directory))

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary.from_tokenizer(self.tokenizer.hf_tokenizer, self.skeleton.vocab_size)


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
    target: ModelFiles
    draft: ModelFiles | None


def plan_run(model: str | Path, draft_model: str | Path | None = None, **options: Any) -> RunPlan:
    """The plan of `specdec.load` with the same arguments; loads no weights.

    Raises BudgetExceeded, ModelNotFound, CheckpointError, UnsupportedModel, VocabularyMismatch.
    """
    return plan_models(run_options(model, draft_model, **options)).plan


def plan_models(options: RunOptions) -> PlannedModels:
    """Read the models' headers, measure the machine, and divide the budget."""
    import torch

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    target = ModelFiles.open(options.model)
    draft = None if options.draft_model is None else ModelFiles.open(options.draft_model)
    if draft is not None:
        compare_vocabularies(target.vocabulary, draft.vocabulary).require_compatible()
    ctx_size = min(options.ctx_size or DEFAULT_CTX_SIZE, target.skeleton.max_context)
    cost_of, bandwidth = _measure(target.skeleton)
    gc.collect()  # what building the models left behind is not the process's base
    total_bytes, source = _budget(options.memory_budget)
    parts = _parts(target.skeleton, draft.skeleton if draft else None, ctx_size, options)
    budget, residency, smallest = _divide(total_bytes, parts, target.skeleton, options)
    cost = cost_of(residency)
    policy = DraftPolicy(options.spec, cost, ctx_size)
    plan = RunPlan(
        budget_bytes=total_bytes,
        budget_source=source,
        parts=tuple(budget.table()),
        residency=residency,
        ctx_size=ctx_size,
        n_draft_tokens=policy.n_nodes if options.spec.spec_type else 0,
        pass_cost=cost,
        storage_bytes_per_second=bandwidth,
        smallest_budget_bytes=smallest,
        has_draft=draft is not None,
    )
    return PlannedModels(plan, target, draft)


def _measure(target: HfModel) -> tuple[Any, float]:
    """(residency plan -> PassCost, storage bytes per second) of this machine and model."""
    compute = measure_compute(target.dtype)
    storage = measure_storage(target.layer_tensors[0][0].record.path)
    bandwidth = storage.storage_bytes_per_second
    layer_bytes = sum(r.n_bytes for layer in target.layer_weights for r in layer.tensors)
    head_bytes = target.vocab_size * target.config.hidden_size * target.dtype.itemsize
    multiplied_bytes = layer_bytes + head_bytes

    def cost_of(residency: ResidencyPlan) -> PassCost:
        return PassCost(
            read_seconds=residency.streamed_bytes / bandwidth,
            row_free_seconds=compute.seconds_per_byte * multiplied_bytes,
            seconds_per_row=compute.seconds_per_byte_row * multiplied_bytes,
        )

    return cost_of, bandwidth


def _budget(memory_budget: str | int) -> tuple[int, str]:
    limit = memory_limit()
    if memory_budget == "auto":
        free_bytes = psutil.virtual_memory().available + process_memory().rss_bytes
        if free_bytes < limit.n_bytes:
            return free_bytes, "what other processes leave free"
        return limit.n_bytes, limit.source
    wanted = parse_bytes(memory_budget)
    if wanted - limit.n_bytes >= mmap.PAGESIZE:  # the kernel rounds limits down to whole pages
        raise ConfigError(
            f"the memory budget of {format_bytes(wanted)} is above the limit of this process, "
            f"{format_bytes(limit.n_bytes)} ({limit.source}): give at most that"
        )
    return min(wanted, limit.n_bytes), "as asked"


def _parts(
    target: HfModel, draft: HfModel | None, ctx_size: int, options: RunOptions
) -> dict[str, int]:
    """Bytes of everything but the target's layers, by name."""
    parts = {
        "target embeddings and head": resident_footprint(target.outer_records),
        "target KV cache": _kv_bytes(target, ctx_size + options.max_nodes),
        "activations": activation_bytes(target, ctx_size, options.max_nodes),
        "converted tensors": target.converted_bytes,
    }
    if draft is not None:
        records = (*draft.outer_records, *(r for x in draft.layer_weights for r in x.tensors))
        n_nodes = MAX_BEAMS * options.spec.depth  # the draft keeps every node that it expanded
        parts["draft weights"] = resident_footprint(records) + draft.converted_bytes
        parts["draft KV cache"] = _kv_bytes(draft, ctx_size + n_nodes)
        parts["draft activations"] = activation_bytes(draft, ctx_size, MAX_BEAMS)
    return parts


def _kv_bytes(model: HfModel, n_rows: int) -> int:
    return -(-n_rows // BLOCK_ROWS) * BLOCK_ROWS * model.kv_bytes_per_token


def _divide(
    total_bytes: int, parts: dict[str, int], target: HfModel, options: RunOptions
) -> tuple[MemoryBudget, ResidencyPlan, int]:
    """Reserve every part by name; the layers get what is left. Also the smallest budget."""
    layers, n_slots = target.layer_weights, options.prefetch_depth
    base_bytes = process_memory().rss_bytes
    needed = base_bytes + HEADROOM_BYTES + sum(parts.values())
    needed += plan_residency(layers, 1 << 62, n_slots=n_slots).smallest_bytes
    smallest = -(-needed // _SMALLEST_STEP_BYTES) * _SMALLEST_STEP_BYTES
    if needed > total_bytes:
        raise BudgetExceeded("this run", needed, total_bytes, smallest)
    budget = MemoryBudget(total_bytes, base_bytes, HEADROOM_BYTES)
    for name, n_bytes in parts.items():
        budget.reserve(name, n_bytes)
    residency = plan_residency(layers, budget.available_bytes, n_slots=n_slots)
    budget.reserve("pinned layers", residency.resident_bytes)
    budget.reserve("ring", residency.ring_bytes)
    return budget, residency, smallest
