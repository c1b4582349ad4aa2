"""Load the models of a plan, and check later options against what was loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backends.contract.backend import Backend
from backends.contract.shares_weights import SharesWeights
from backends.contract.source import Loading
from offload.placement.placement import Placement
from offload.process.temporary import is_memory, temporary_folder
from specdec.checks import ConfigError, FieldName
from specdec.config import SpecConfig
from specdec.drafters.frontier import level_width
from specdec.models.names import MTP_HEAD
from specdec.planning.memory.parts import max_draft_nodes, planned_width
from specdec.planning.plan import PlannedModels
from specdec.planning.run_plan import RunPlan
from specdec.run_options import RunOptions
from specdec.sampling.context_window import ContextWindow, draft_context_size


def load_target(
    planned: PlannedModels,
    options: RunOptions,
    progress: Any = None,
) -> Backend:
    """Load the target's weights as the plan places them.

    Args:
        progress: called with (bytes done, bytes in total) by threads that read weights, some of
            which go on while the first prompt is computed.
    """
    plan, draft = planned.plan, planned.draft
    return planned.target.source.load(
        Loading(
            plan.placement,
            max_context=plan.ctx_size,
            kv_tokens=plan.kv_tokens,
            max_num_seqs=options.max_kept_seqs,
            max_nodes=options.target_nodes(plan.n_draft_tokens),
            max_num_tokens=options.max_target_tokens(plan.n_draft_tokens),
            load_mode=_target_load_mode(options.load_mode, plan.placement),
            n_readers=options.io_threads,
            progress=progress,
            vram_bytes=plan.torch_vram_bytes,
            has_head=options.draft == MTP_HEAD,
            kv_split=plan.kv_split,
            kv_folder=None if plan.kv_split is None else _kv_folder(options),
            hidden_state_layers=() if draft is None else draft.source.target_layers,
        )
    )


def _kv_folder(options: RunOptions) -> Path:
    """Return the folder of the file with cold KV. Raises ConfigError where there is none that is
    on storage."""
    if options.prompt_cache_dir is not None:
        folder = Path(options.prompt_cache_dir).expanduser()
        if is_memory(folder):
            raise ConfigError(
                FieldName("prompt_cache_dir"),
                f" is {folder}, which is memory, and the KV cache does not fit in the budget: name "
                "a folder on storage, or raise the budget",
            )
        return folder
    temporary = temporary_folder()
    if temporary is None:
        raise ConfigError(
            "the KV cache does not fit in the budget, and no folder for temporary files is on "
            "storage: set TMPDIR, name a --prompt-cache-dir, or raise the budget"
        )
    return temporary


def load_draft(
    planned: PlannedModels, options: RunOptions, target: Backend
) -> tuple[Backend | None, ContextWindow]:
    """Load the draft; return it with its window of a sequence, or (None, no window limit).

    Args:
        target: the loaded target, whose weights a draft head shares.
    """
    plan, placement = planned.plan, planned.plan.draft_placement
    if planned.draft is None or placement is None:
        return None, ContextWindow()
    source, draft_window = planned.draft.source, options.spec.draft_window
    if isinstance(source, SharesWeights):
        source.share_weights(target)
    n_nodes = max_draft_nodes(plan.n_draft_tokens, source.max_tree_leaves)
    context = draft_context_size(draft_window, plan.ctx_size, source.max_context, n_nodes)
    loading = Loading(
        placement,
        max_context=context,
        kv_tokens=context * plan.kv_tokens // plan.ctx_size,
        max_num_seqs=options.max_kept_seqs,
        max_nodes=n_nodes,
        max_num_tokens=level_width(plan.n_draft_tokens),
        load_mode="stream" if placement.streams else "ram",
        vram_bytes=plan.torch_vram_bytes,
    )
    longest = None if options.context_shift else target.max_context
    window = ContextWindow.fitting(draft_window, context, longest, n_nodes)
    return source.load(loading), window


def check_spec(spec: SpecConfig, loaded: SpecConfig, plan: RunPlan, has_draft: bool) -> None:
    """Raise ConfigError where `spec` needs more memory than was reserved.

    Args:
        loaded: the SpecConfig that the models were loaded with.
    """
    num_draft_tokens, limit = spec.num_draft_tokens or 0, plan.n_draft_tokens
    if num_draft_tokens > limit:
        raise ConfigError(
            FieldName("num_draft_tokens"),
            f" is {num_draft_tokens}, but the models were loaded with memory for {limit}: "
            f"load them with num_draft_tokens={num_draft_tokens}",
        )
    if "draft" not in spec.spec_type:
        return
    if not has_draft:
        raise ConfigError(FieldName("spec_type"), " has 'draft' but no draft model was loaded")
    if spec.width > planned_width(loaded):
        raise ConfigError(
            FieldName("tree_width"),
            f" is {spec.width}, but the models were loaded with memory for "
            f"{planned_width(loaded)}: load them with tree_width={spec.width}",
        )
    if spec.draft_window != loaded.draft_window:
        raise ConfigError(
            FieldName("draft_window"),
            f" is {spec.draft_window}, but the draft was loaded with "
            f"{loaded.draft_window}: give it when loading",
        )


def _target_load_mode(requested: str, placement: Placement) -> str:
    """Return the load mode: a target that fits keeps its file's layout, as streaming does."""
    if requested in ("ram", "mmap"):
        return requested
    return "stream" if placement.streams else "mmap"
