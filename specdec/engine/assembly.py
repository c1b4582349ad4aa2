"""Assemble the engine's parts once its models are loaded."""

from __future__ import annotations

from functools import partial

from backends.contract.kv_files import KvFiles
from backends.contract.prefix_cache import PrefixCache
from specdec.drafters.frontier import level_width
from specdec.engine.draft_worker import DraftWorker
from specdec.engine.engine import Engine
from specdec.engine.kv_cache_manager import KVCacheManager
from specdec.engine.prompt_cache import PromptCacheFolder
from specdec.engine.scheduler import Scheduler
from specdec.engine.speculation import Speculation
from specdec.metrics.recorder import Totals
from specdec.planning.loaded import LoadedModels
from specdec.planning.memory.parts import DRAFTING_PARTS
from specdec.policy.kv_price import KvPrice
from specdec.policy.opportunistic_layers import OpportunisticLayers
from specdec.policy.waiting_notes import WaitingNotes


def assemble(
    engine: Engine,
    models: LoadedModels,
    worker: DraftWorker,
    totals: Totals,
    folder: PromptCacheFolder | None,
) -> None:
    """Give the engine its scheduler, speculation and opportunistic layer cache.

    An engine that had others goes on with its sequences, all of which wait.

    Args:
        totals: counters that all parts share.
        folder: prefixes on storage; None: there are none.
    """
    plan, options, target, draft = models.plan, models.options, models.target, models.draft
    prefix_cache, draft_prefix_cache = models.prefix_cache, models.draft_prefix_cache
    cost, previous = models.pair_statistics.cost, engine.scheduler
    max_nodes = options.max_target_tokens(plan.n_draft_tokens)
    parts = dict(plan.parts)
    engine.opportunistic_layers = OpportunisticLayers(
        target,
        draft,
        plan.budget_bytes,
        activation_bytes=parts.get("target activations", 0),
        max_num_tokens=max_nodes,
        draft_activation_bytes=parts.get("draft activations", 0),
        draft_level_tokens=level_width(plan.n_draft_tokens),
        drafting_bytes=sum(parts.get(name, 0) for name in DRAFTING_PARTS),
        is_streamed=plan.placement.streamed_bytes > 0,
        draft_prefix_cache=draft_prefix_cache,
    )
    engine.speculation = Speculation(
        target,
        draft,
        worker,
        max_draft_tokens=level_width(plan.n_draft_tokens),
        max_nodes=max_nodes,
        totals=totals,
    )
    free_memory = engine.opportunistic_layers.free_memory
    if previous is None:
        files = KvFiles(target, free_memory=free_memory)
    else:
        files = previous.kv.files
        files.use(target, free_memory)
    max_num_seqs = options.max_num_seqs
    # KV beyond one context is for sequences that run: cached, it would displace layers.
    max_cached = options.min_kv_tokens(plan.ctx_size)
    price = KvPrice(plan.kv_token_bytes, plan.storage_bytes_per_second)
    notes = WaitingNotes(plan.kv_tokens, price)
    kv = KVCacheManager(
        target, prefix_cache, files, cost, totals, max_num_seqs, max_cached, price, notes
    )
    if folder is not None:
        folder.set_models(models.planned.target, models.planned.draft)
        folder.attach(prefix_cache, draft_prefix_cache, plan, free_memory)
        engine.save_prefixes = partial(_save_prefixes, kv, draft_prefix_cache)
    engine.scheduler = Scheduler(
        kv,
        cost,
        totals,
        max_num_seqs=max_num_seqs,
        max_num_nodes=max_nodes,
        max_prefill_tokens=plan.max_prompt_tokens,
        kv_seconds=lambda: target.cold_kv_bytes / plan.storage_bytes_per_second,
    )
    if previous is not None:
        engine.scheduler.take_over(previous)


def _save_prefixes(kv: KVCacheManager, draft_prefix_cache: PrefixCache | None) -> None:
    kv.save_prefixes()
    if draft_prefix_cache is not None:
        draft_prefix_cache.save_new()
