"""Put the engine's parts together, once its models are loaded."""

from __future__ import annotations

from backends.contract.backend import Backend
from backends.contract.kv_files import KvFiles
from backends.contract.prefix_cache import PrefixCache
from specdec.drafters.model import level_width
from specdec.engine.draft_worker import DraftWorker
from specdec.engine.engine import Engine
from specdec.engine.kv_cache_manager import KVCacheManager
from specdec.engine.scheduler import Scheduler
from specdec.engine.speculation import Speculation
from specdec.metrics.recorder import Totals
from specdec.planning.memory.parts import DRAFTING_PARTS
from specdec.planning.run_plan import RunPlan
from specdec.policy.cost_model import CostModel
from specdec.policy.spare_memory import SpareMemory
from specdec.run_options import RunOptions


def assemble(
    engine: Engine,
    plan: RunPlan,
    options: RunOptions,
    target: Backend,
    draft: Backend | None,
    texts: PrefixCache,
    draft_texts: PrefixCache | None,
    worker: DraftWorker,
    totals: Totals,
    cost: CostModel,
) -> None:
    """Give the engine its scheduler, speculation and memory that layers may use.

    Args:
        texts, draft_texts: the KV of the target's and the draft's texts.
        totals: what all of them count in.
        cost: a pass of the target, as planned and measured.
    """
    max_nodes = options.target_rows(plan.n_draft_tokens)
    parts = dict(plan.parts)
    engine.spare = SpareMemory(
        target,
        draft,
        plan.budget_bytes,
        activation_bytes=parts.get("target activations", 0),
        most_rows=max_nodes,
        draft_activation_bytes=parts.get("draft activations", 0),
        draft_level_rows=level_width(plan.n_draft_tokens),
        drafting_bytes=sum(parts.get(name, 0) for name in DRAFTING_PARTS),
        is_streamed=plan.residency.streamed_bytes > 0,
        draft_texts=draft_texts,
    )
    engine.speculation = Speculation(
        target,
        draft,
        worker,
        max_draft_tokens=level_width(plan.n_draft_tokens),
        max_nodes=max_nodes,
        totals=totals,
    )
    files = KvFiles(target, make_way=engine.spare.make_way)
    max_num_seqs = options.parallel
    engine.scheduler = Scheduler(
        KVCacheManager(target, texts, files, cost, totals, max_num_seqs),
        cost,
        totals,
        max_num_seqs=max_num_seqs,
        max_num_nodes=max_nodes,
        max_prefill_tokens=plan.ctx_size,
    )
