"""From options to a plan, before anything large is allocated: open, measure, divide, predict."""

from __future__ import annotations

import gc
import mmap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from backends.shared_source import SharedSource
from backends.source import BackendOptions, ModelSource
from offload.budget import BudgetExceeded
from offload.memory import memory_limit, process_memory
from offload.profile import measure_storage
from offload.units import format_bytes, parse_bytes
from specdec.allocator import free_large_blocks_at_once, give_back_freed
from specdec.compat import compare_vocabularies
from specdec.config import ConfigError, SpecConfig
from specdec.division import Divider, Division
from specdec.formats import OpenedModel, open_model
from specdec.options import SELF_DRAFT, RunOptions, run_options
from specdec.policy import DraftPolicy, PassCost
from specdec.run_plan import RunPlan

_SMALL_TREE = 8
"""Draft tokens that every automatic plan has room for."""


@dataclass(frozen=True)
class PlannedModels:
    """A plan, and the models (without weights) that it was made for."""

    plan: RunPlan
    target: OpenedModel
    draft: OpenedModel | None


def plan_run(model: str | Path, draft_model: str | Path | None = None, **options: Any) -> RunPlan:
    """The plan of `specdec.load` with the same arguments; loads no weights.

    Raises BudgetExceeded, ModelNotFound, CheckpointError, UnsupportedModel, VocabularyMismatch.
    """
    return plan_models(run_options(model, draft_model, **options)).plan


def plan_models(options: RunOptions) -> PlannedModels:
    """Read the models' headers, measure the machine, and divide the budget."""
    free_large_blocks_at_once()
    target = open_model(options.model, options.backend)
    draft = None
    if options.draft_model == SELF_DRAFT:
        draft = replace(target, source=SharedSource(target.source))
    elif options.draft_model is not None:
        # Cache types are the target's: a draft's KV is small.
        draft = open_model(options.draft_model, BackendOptions(options.backend.n_threads))
        compare_vocabularies(target.vocabulary, draft.vocabulary).require_compatible()
    draft_source = None if draft is None else draft.source
    _check_options(options, target.source)
    bandwidth = measure_storage(target.source.weight_file).storage_bytes_per_second
    costs = _Costs(target.source, draft_source, bandwidth)
    gc.collect()  # what building the models left behind is not the process's base
    give_back_freed()
    total_bytes, source = _budget(options.memory_budget)
    divider = Divider(target.source, draft_source, options)
    division = _divide(divider, total_bytes, options.spec, costs, target.source.max_tree_leaves)
    if options.draft_model == SELF_DRAFT:
        _check_in_memory(options, division)
    plan = _make_plan(options, division, costs, target.source, source)
    return PlannedModels(plan, target, draft)


def _divide(
    divider: Divider, total_bytes: int, spec: SpecConfig, costs: _Costs, most: int | None
) -> Division:
    """Divide for trees as large as a pass verifies for free, or smaller ones where memory is short.

    How much a pass reads decides how many tokens are free, and their rows of the KV cache and of
    logits take memory from the layers: so first with small trees, and then with those.
    """
    if not spec.spec_type or spec.num_draft_tokens is not None:
        return divider.divide(total_bytes, (spec.num_draft_tokens or 0) if spec.spec_type else 0)
    division = divider.divide(total_bytes, _SMALL_TREE)
    policy = DraftPolicy(spec, costs.target(division), division.ctx_size, max_nodes=most)
    n_drafted = policy.n_nodes
    while n_drafted > _SMALL_TREE:
        try:
            return divider.divide(total_bytes, n_drafted)
        except BudgetExceeded:
            n_drafted //= 2
    return division


def _make_plan(
    options: RunOptions, division: Division, costs: _Costs, target: ModelSource, source: str
) -> RunPlan:
    cost, draft_cost = costs.target(division), costs.draft(division)
    policy = DraftPolicy(options.spec, cost, division.ctx_size, draft_cost, division.n_drafted)
    return RunPlan(
        budget_bytes=division.budget.total_bytes,
        budget_source=source,
        parts=tuple(division.budget.table()),
        residency=division.target,
        ctx_size=division.ctx_size,
        n_draft_tokens=policy.n_nodes if options.spec.spec_type else 0,
        pass_cost=cost,
        storage_bytes_per_second=costs.bandwidth,
        smallest_budget_bytes=division.smallest_bytes,
        draft_residency=division.draft,
        draft_cost=draft_cost,
        draft_depth=policy.depth if draft_cost is not None else 0,
        uses_mmap=options.load_mode == "mmap",
        warnings=target.warnings,
    )


def _check_options(options: RunOptions, target: ModelSource) -> None:
    if options.load_mode == "mmap" and not target.can_mmap:
        raise ConfigError(
            f"load mode mmap is for GGUF models: {target.path} can be streamed or held in ram"
        )
    most, asked = target.max_tree_leaves, options.spec.num_draft_tokens
    if most is not None and asked is not None and asked > most:
        raise ConfigError(
            f"num_draft_tokens is {asked}, but a GGUF target verifies at most {most} at a time"
        )


def _check_in_memory(options: RunOptions, division: Division) -> None:
    """Raise ConfigError for a target that drafts for itself and streams."""
    if options.load_mode != "mmap" and not division.target.streamed_bytes:
        return
    whole = sum(r.n_bytes for layer in division.target.layers for r in layer.tensors)
    raise ConfigError(
        f"{options.model} is not held in memory, where its layers would take "
        f"{format_bytes(whole)}: as its own draft it would be read once for each level of a tree: "
        "raise the budget, or use a small draft model or --spec-type ngram"
    )


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
            f"the memory budget of {wanted} bytes is above the limit of this process, "
            f"{limit.n_bytes} bytes ({limit.source}): give at most that"
        )
    return min(wanted, limit.n_bytes), "as asked"


class _Costs:
    """What a pass costs on this machine, once it is known what streams."""

    def __init__(self, target: ModelSource, draft: ModelSource | None, bandwidth: float) -> None:
        self.bandwidth = bandwidth
        self._target = target.measure_compute()
        self._draft = None if draft is None else draft.measure_compute()

    def target(self, division: Division) -> PassCost:
        return PassCost(
            read_seconds=division.target.streamed_bytes / self.bandwidth,
            row_free_seconds=self._target.fixed_seconds,
            seconds_per_row=self._target.seconds_per_row,
        )

    def draft(self, division: Division) -> PassCost | None:
        if self._draft is None or division.draft is None:
            return None
        return PassCost(
            read_seconds=division.draft.streamed_bytes / self.bandwidth,
            row_free_seconds=self._draft.fixed_seconds,
            seconds_per_row=self._draft.seconds_per_row,
        )
