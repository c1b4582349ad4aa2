"""Planning from options, before anything large is allocated: open, measure, divide, predict."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from typing_extensions import Unpack

from backends.contract.source import ModelSource
from offload.budget import BudgetExceeded, format_up
from offload.placement.tiers import VRAM
from offload.process.allocator import free_large_blocks_at_once
from offload.units import format_bytes
from specdec.checks import ConfigError, FieldName, refuse_unknown
from specdec.models.drafts import AUTO_DRAFT, draft_candidates
from specdec.models.opened import OpenedModel, OpenedPair, Sources
from specdec.models.outlines import planned_name
from specdec.planning.draft_ranking import PlannedCandidate, ranked_draft
from specdec.planning.gpu import check_no_gpu_options, find_gpu, measure_with_gpu, placement
from specdec.planning.keywords import LoadKeywords
from specdec.planning.kv_capacity import with_kv_capacity
from specdec.planning.measurements import Measurements, measure_figures
from specdec.planning.memory.base import budget_of_run, measure_base
from specdec.planning.memory.memory_plan import Gpu, MemoryPlan
from specdec.planning.memory.planner import MemoryPlanner
from specdec.planning.opening import open_pair, open_to_plan
from specdec.planning.run_plan import RunPlan
from specdec.planning.saved_statistics import SavedStatistics
from specdec.planning.search import Alternative, Search
from specdec.run_options import CPU, ON, RunOptions

logger = logging.getLogger(__name__)
MAX_STATE_SHARE = 1 / 8
"""Maximum share of the budget for recurrent states, unless those of one sequence take more. Layers
that have no place beside them are read in every pass, which makes it a seventh longer at most."""
MAX_RECURRENT_SEQS = 8
"""Maximum sequences with recurrent states, unless asked for: their states are never layers'."""
_MIN_REPORTED_SHARE = 1.05
"""Speedup of a run without the draft from which the plan warns about it."""


@dataclass(frozen=True)
class Planning:
    """Opened models and this machine's figures: all that a plan of a run needs beside a budget."""

    options: RunOptions
    """As asked for, a draft that a plan leaves out included."""
    pair: OpenedPair
    measurements: Measurements
    base_bytes: int
    """Memory of the process before anything was loaded."""
    gpu: Gpu | None

    @property
    def takes_memory(self) -> bool:
        """Whether `plan` takes memory that matters beside loaded models."""
        return any(source.planning_takes_memory for source in self.pair.sources if source)

    def without_draft(self) -> Planning:
        """Return the planning of the same run without its draft model."""
        pair = OpenedPair(self.pair.target, None)
        return replace(self, options=self.options.without_draft(), pair=pair)

    def plan(self, total_bytes: int, budget_source: str) -> PlannedModels:
        """Return the models as planned for a budget. Raises BudgetExceeded."""
        pair = self.pair
        try:
            plan = make_plan(
                self.options,
                pair,
                self.measurements,
                total_bytes,
                budget_source,
                self.base_bytes,
                self.gpu,
            )
        finally:
            for source in pair.sources:
                if source is not None:
                    source.end_planning()
        options = for_recurrent(self.options, pair.target.source, total_bytes)
        if options.parallel is not None:
            options = replace(options, parallel=plan.max_num_seqs)
        if pair.draft is not None and plan.draft_placement is None:
            options, pair = options.without_draft(), OpenedPair(pair.target, None)
        to_load = placement(pair, self.gpu, plan.draft_device)
        return PlannedModels(plan, options, to_load.target, to_load.draft, self)


@dataclass(frozen=True)
class PlannedModels:
    """A plan and its opened models (without weights). A draft that the plan leaves out is None, and
    removed from the options."""

    plan: RunPlan
    options: RunOptions
    target: OpenedModel
    draft: OpenedModel | None
    planning: Planning
    """Planning of the same run for other budgets."""


def plan_run(
    model: str | Path, draft_model: str | Path | None = None, **options: Unpack[LoadKeywords]
) -> RunPlan:
    """Return the plan of `specdec.load` with the same arguments; load a small model, to time it.

    Raises BudgetExceeded, ModelNotFound, CheckpointError, UnsupportedModel, VocabularyMismatch.
    """
    refuse_unknown(options, RunOptions, "plan_run()")
    asked = with_named_draft(RunOptions(planned_name(model), draft_model, **options))
    if asked.draft_model is not None:
        asked = replace(asked, draft_model=planned_name(asked.draft_model))
    return _plan_asked(asked).plan


def with_named_draft(options: RunOptions) -> RunOptions:
    """Return the options with the draft that -md auto chooses, and say why."""
    if options.draft_model != AUTO_DRAFT:
        return options
    if options.draft is None:  # it would not be used
        return replace(options, draft_model=None)
    takes_heads = options.device == CPU
    candidates = draft_candidates(str(options.model), takes_heads=takes_heads)
    choice = ranked_draft(options, candidates, _plan_asked)
    logger.warning(choice.line)
    return replace(options, draft_model=choice.name)


def _plan_asked(asked: RunOptions) -> PlannedCandidate:
    """Plan a run of models that may be on the hub. Raises what `plan_run` raises."""
    free_large_blocks_at_once()
    if asked.device == CPU:
        check_no_gpu_options(asked)
    total_bytes, source = budget_of_run(asked.memory_budget)
    pair = open_to_plan(asked)
    measurements, gpu, base_bytes = _measure(asked, pair, total_bytes)
    try:
        plan = make_plan(asked, pair, measurements, total_bytes, source, base_bytes, gpu)
    finally:
        for model in pair.sources:
            if model is not None:
                model.end_planning()
    return PlannedCandidate(plan, pair.sources, measurements)


def plan_models(
    options: RunOptions,
    budget: tuple[int, str] | None = None,
) -> PlannedModels:
    """Read the models' headers, measure the machine, and divide the budget.

    Args:
        budget: the result of `budget_of_run`, where it was called already.
    """
    free_large_blocks_at_once()
    if options.device == CPU:
        check_no_gpu_options(options)
    total_bytes, source = budget or budget_of_run(options.memory_budget)
    pair = open_pair(options)
    measurements, gpu, base_bytes = _measure(options, pair, total_bytes)
    planning = Planning(options, pair, measurements, base_bytes, gpu)
    return planning.plan(total_bytes, source)


def _measure(
    options: RunOptions, pair: Sources, total_bytes: int
) -> tuple[Measurements, Gpu | None, int]:
    """Return this machine's figures, the GPU of the run, and the process's base memory."""
    gpu = find_gpu(for_recurrent(options, pair.sources[0], total_bytes), pair)
    if gpu is None:
        # Before anything is timed, which is done once and leaves tens of MiB behind: the next
        # process has the figures from the disk cache, and its plan must be the same.
        base_bytes = measure_base(*pair.sources)
        return measure_figures(pair, total_bytes), None, base_bytes
    measurements = measure_with_gpu(pair, gpu)  # loads the GPU's libraries
    return measurements, gpu, measure_base()


def make_plan(
    options: RunOptions,
    pair: Sources,
    measurements: Measurements,
    total_bytes: int,
    budget_source: str,
    base_bytes: int,
    gpu: Gpu | None = None,
    *,
    uses_statistics: bool = True,
) -> RunPlan:
    """Choose the memory plan that is fastest according to the measurements.

    base_bytes: memory that the process takes already.
    uses_statistics: leave out a draft that lost in earlier runs, which were on this machine.

    Raises BudgetExceeded with the smallest budget that works.
    """
    same = (pair, measurements, total_bytes, budget_source, base_bytes, gpu, uses_statistics)
    if options.parallel is not None or not pair.sources[0].state_bytes(1, 1):
        return _plan_of(options, *same)
    # States of fewer sequences take less memory: one is what the smallest budget is for.
    n = for_recurrent(options, pair.sources[0], total_bytes).max_num_seqs
    while True:
        try:
            plan = _plan_of(replace(options, parallel=n), *same)
        except BudgetExceeded:
            if n == 1:
                raise
            n //= 2
        else:
            return plan.with_smallest_of(
                MemoryPlanner(*pair.sources, replace(options, parallel=1), base_bytes, gpu)
            )


def _plan_of(
    options: RunOptions,
    pair: Sources,
    measurements: Measurements,
    total_bytes: int,
    budget_source: str,
    base_bytes: int,
    gpu: Gpu | None,
    uses_statistics: bool,
) -> RunPlan:
    """Return the plan of `make_plan` for options with a number of sequences."""
    target, draft = pair.sources
    options = for_recurrent(options, target, total_bytes)
    exactness = (target if gpu is None else gpu.target).exactness
    if options.exact == ON and not exactness.is_exact:
        raise ConfigError(
            FieldName("exact"), f" is 'on', but {exactness.reason}: 'auto' runs all the same"
        )
    search = Search(MemoryPlanner(target, draft, options, base_bytes, gpu), measurements)

    def completed(
        chosen: Alternative, warnings: tuple[str, ...], notes: tuple[str, ...]
    ) -> RunPlan:
        chosen = with_kv_capacity(search, chosen, total_bytes)
        own_warnings = target.warnings if gpu is None else gpu.target.warnings + gpu.warnings
        return RunPlan(
            budget_source=budget_source,
            chosen=chosen,
            alternatives=tuple(search.alternatives),
            exactness=exactness,
            cache_types=target.cache_types,
            uses_mmap=options.load_mode == "mmap",
            accept_threshold=None if options.spec.is_lossless else options.spec.accept_threshold,
            tree_width=options.spec.width,
            warnings=own_warnings + warnings,
            notes=_cut_context(options, chosen.memory_plan) + notes,
            vram_source="" if gpu is None else gpu.vram_source,
            max_num_seqs=options.max_num_seqs,
        )

    best = search.best(total_bytes)
    plan = completed(best, *_remarks(best, search))
    loss = _known_loss(best, search, plan, pair) if uses_statistics else None
    return plan if loss is None else completed(search.alone(total_bytes), (), (loss,))


def _known_loss(best: Alternative, search: Search, plan: RunPlan, pair: Sources) -> str | None:
    """Return the note that a draft is left out because it lost in earlier processes; None where it
    did not, where nothing is known, or where it takes next to no memory."""
    if not search.should_leave_out(best, lambda plan: plan.plain_tokens_per_second):
        return None
    sources = [source for source in pair.sources if source is not None]
    if not SavedStatistics(plan, sources).pair_statistics.has_lost:
        return None
    return (
        "the draft is left out: in earlier runs it was slower than plain decoding, and its memory "
        "is better used for the target; --spec-type draft,ngram loads it all the same"
    )


def for_recurrent(options: RunOptions, target: ModelSource, total_bytes: int) -> RunOptions:
    """Return options that suit recurrent layers, where the user leaves the choice.

    Targets that take a pass for each branch of a tree and each sequence get chains, and one
    sequence. Of others so few run at a time that their states take a small part of the budget.
    """
    if target.prefers_chains and options.tree_width is None:
        options = replace(options, tree_width=1)
    if options.parallel is not None:
        return options
    n = 1 if target.prefers_chains else options.max_num_seqs
    if target.state_bytes(1, 1):
        n = min(n, MAX_RECURRENT_SEQS)
    while n > 1 and target.state_bytes(n, n) > MAX_STATE_SHARE * total_bytes:
        n //= 2
    return replace(options, parallel=n)


def _cut_context(options: RunOptions, memory_plan: MemoryPlan) -> tuple[str, ...]:
    if options.ctx_size is None or options.ctx_size <= memory_plan.ctx_size:
        return ()
    return (f"a context of {options.ctx_size} is cut to the model's {memory_plan.ctx_size}",)


def _remarks(chosen: Alternative, search: Search) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (warnings that a required draft slows a streamed target down, notes that a draft is
    left out, and how to load it all the same)."""
    with_draft = [
        alternative for alternative in search.alternatives if alternative.draft is not None
    ]
    if not with_draft or search.plain is None:
        return (), (_no_capacity(chosen.memory_plan, search),) if search.refusals else ()
    speed = search.plain.tokens_per_second
    if chosen.draft is None:
        best = max(alternative.better_tokens_per_second for alternative in with_draft)
        note = (
            f"the draft is left out: its memory is better used for the target "
            f"({speed:.2f} tokens/s predicted without it, {best:.2f} with it); "
            "--spec-type draft,ngram loads it all the same"
        )
        return (), (note,)
    beside = chosen.better_tokens_per_second
    if speed < _MIN_REPORTED_SHARE * beside or not chosen.target.placement.n_moving_layers:
        return (), ()
    warning = (
        f"without the draft it should be faster: {speed:.2f} tokens/s "
        f"instead of {beside:.2f}; take a smaller draft, or none"
    )
    return (warning,), ()


def _no_capacity(alone: MemoryPlan, search: Search) -> str:
    """Return the note that a draft is left out for lack of memory, with the budgets of both cases.

    alone: the memory plan without the draft.
    """
    ledger = search.refusals[0].ledger
    budget = alone.vram if ledger == VRAM and alone.vram is not None else alone.budget
    option = "--vram-budget" if budget is alone.vram else "--memory-budget"
    with_draft = format_up(search.memory_planner.smallest.of(ledger))
    return (
        f"the draft is left out: the {ledger} budget of {format_bytes(budget.total_bytes)} has no "
        f"memory for it; the smallest with it is {with_draft}, without it "
        f"{format_up(alone.smallest.of(ledger))}: raise {option}, or take a smaller draft; "
        "n-grams draft instead"
    )
