"""From a plan to models with weights, and what may be asked of them afterwards."""

from __future__ import annotations

from typing import Any

from backends.contract.backend import Backend
from backends.contract.self_draft import SharedSource
from backends.contract.source import Loading
from offload.placement.placement import Placement
from specdec.checks import ConfigError, FieldName
from specdec.config import SpecConfig
from specdec.drafters.model import level_width
from specdec.drafters.window import DraftWindow, draft_context_size
from specdec.planning.memory.parts import max_draft_nodes, planned_width
from specdec.planning.plan import PlannedModels
from specdec.planning.run_plan import RunPlan
from specdec.planning.weight_prefetch import Prefetch
from specdec.run_options import RunOptions


def load_target(
    planned: PlannedModels,
    options: RunOptions,
    progress: Any = None,
    weight_prefetch: Prefetch | None = None,
) -> Backend:
    """The target's weights where the plan wants them.

    Args:
        early: some that are read already.
        progress: called with (bytes done, bytes in total) by threads that read weights, some of
            which go on while the first prompt is computed.
    """
    plan = planned.plan
    return planned.target.source.load(
        Loading(
            plan.placement,
            max_context=plan.ctx_size,
            kv_tokens=options.all_tokens(plan.ctx_size),
            max_num_seqs=options.max_num_seqs,
            max_nodes=options.target_nodes(plan.n_draft_tokens),
            max_num_tokens=options.max_target_tokens(plan.n_draft_tokens),
            load_mode=_target_load_mode(options.load_mode, plan.placement),
            n_readers=options.io_threads,
            progress=progress,
            weight_prefetch=None if weight_prefetch is None else weight_prefetch.weights,
            vram_bytes=plan.torch_vram_bytes,
        )
    )


def load_draft(
    planned: PlannedModels, options: RunOptions, target: Backend
) -> tuple[Backend | None, DraftWindow]:
    """The draft and what it is shown of a text; (None, the whole text) where none is planned.

    Args:
        target: loaded; its weights are the draft's where it drafts for itself.
    """
    plan, placement = planned.plan, planned.plan.draft_placement
    if planned.draft is None or placement is None:
        return None, DraftWindow()
    source, requested = planned.draft.source, options.spec.draft_window
    if isinstance(source, SharedSource):
        source.share_weights(target)
    n_nodes = max_draft_nodes(plan.n_draft_tokens, source.max_tree_leaves)
    context = draft_context_size(requested, plan.ctx_size, source.max_context, n_nodes)
    loading = Loading(
        placement,
        max_context=context,
        kv_tokens=context * options.all_tokens(plan.ctx_size) // plan.ctx_size,
        max_num_seqs=options.max_num_seqs,
        max_nodes=n_nodes,
        max_num_tokens=level_width(plan.n_draft_tokens),
        load_mode="stream" if placement.streams else "ram",
        vram_bytes=plan.torch_vram_bytes,
    )
    window = DraftWindow.fitting(requested, context, target.max_context, n_nodes)
    return source.load(loading), window


def check_spec(spec: SpecConfig, loaded: SpecConfig, plan: RunPlan, has_draft: bool) -> None:
    """Raise ConfigError where `spec` asks for more than memory was set aside for.

    Args:
        loaded: how to draft, as it was said when the models were loaded.
    """
    asked, limit = spec.num_draft_tokens or 0, plan.n_draft_tokens
    if asked > limit:
        raise ConfigError(
            FieldName("num_draft_tokens"),
            f" is {asked}, but the models were loaded with room for {limit}: "
            f"load them with num_draft_tokens={asked}",
        )
    if "draft" not in spec.spec_type:
        return
    if not has_draft:
        raise ConfigError(FieldName("spec_type"), " has 'draft' but no draft model was loaded")
    if spec.width > planned_width(loaded):
        raise ConfigError(
            FieldName("tree_width"),
            f" is {spec.width}, but the models were loaded with room for "
            f"{planned_width(loaded)}: load them with tree_width={spec.width}",
        )
    if spec.draft_window != loaded.draft_window:
        raise ConfigError(
            FieldName("draft_window"),
            f" is {spec.draft_window}, but the draft was loaded with "
            f"{loaded.draft_window}: give it when loading",
        )


def _target_load_mode(requested: str, placement: Placement) -> str:
    """A target that fits is held in the layout of its file, whose logits are a streamed one's."""
    if requested in ("ram", "mmap"):
        return requested
    return "stream" if placement.streams else "mmap"
