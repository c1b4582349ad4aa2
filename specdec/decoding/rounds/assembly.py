"""What runs the rounds of a session's texts, put together once its models are loaded."""

from __future__ import annotations

from backends.contract.backend import Backend
from backends.contract.kept_texts import KeptTexts
from backends.contract.kv_files import KvFiles
from specdec.decoding.rounds.controller import Controller
from specdec.decoding.rounds.draft_worker import DraftWorker
from specdec.decoding.rounds.recorder import Totals
from specdec.decoding.rounds.room import Room
from specdec.decoding.rounds.scheduler import Scheduler
from specdec.drafters.model import level_width
from specdec.planning.memory.parts import DRAFTING_PARTS
from specdec.planning.run_plan import RunPlan
from specdec.policy.spare_memory import SpareMemory
from specdec.run_options import RunOptions


def scheduler_of(
    plan: RunPlan,
    options: RunOptions,
    target: Backend,
    draft: Backend | None,
    texts: KeptTexts,
    draft_texts: KeptTexts | None,
    worker: DraftWorker,
    totals: Totals,
) -> Scheduler:
    """The scheduler, and below it the controller, room for KV and spare memory.

    Args:
        texts, draft_texts: the KV of the target's and the draft's texts.
        totals: what all of them count in.
    """
    max_rows = options.target_rows(plan.n_draft_tokens)
    parts = dict(plan.parts)
    spare = SpareMemory(
        target,
        draft,
        plan.budget_bytes,
        activation_bytes=parts.get("target activations", 0),
        most_rows=max_rows,
        draft_activation_bytes=parts.get("draft activations", 0),
        draft_level_rows=level_width(plan.n_draft_tokens),
        drafting_bytes=sum(parts.get(name, 0) for name in DRAFTING_PARTS),
        is_streamed=plan.residency.streamed_bytes > 0,
        draft_texts=draft_texts,
    )
    controller = Controller(
        target,
        draft,
        worker,
        max_draft_rows=level_width(plan.n_draft_tokens),
        max_rows=max_rows,
        totals=totals,
    )
    kv_files = KvFiles(target, make_way=spare.make_way)
    room = Room(target, texts, kv_files, plan.pass_cost, totals, options.parallel)
    return Scheduler(
        controller,
        room,
        spare,
        plan.pass_cost,
        max_texts=options.parallel,
        max_entering=plan.ctx_size,
    )
