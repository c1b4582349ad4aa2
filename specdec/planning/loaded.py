"""The loaded models of a run: loaded as planned, and again with the plan for another budget."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from backends.contract.backend import Backend, TransferStats
from backends.contract.prefix_cache import PrefixCache
from offload.process.allocator import give_back_freed
from offload.ring.bandwidth import correct_storage
from specdec.planning.load import load_draft, load_target
from specdec.planning.plan import PlannedModels
from specdec.planning.run_plan import RunPlan
from specdec.planning.saved_statistics import SavedStatistics
from specdec.policy.pair_statistics import PairStatistics
from specdec.run_options import RunOptions
from specdec.sampling.context_window import ContextWindow


class LoadedModels:
    """A target with its draft, from `load` to `close`, after which they may be loaded again.

    Attributes:
        planned: the models without weights and their plan.
        target, draft: None is no draft.
        draft_window: part of a context that the draft's cache contains.
        prefix_cache, draft_prefix_cache: KV of their sequences.
        pair_statistics: costs and acceptance, saved by `close`.
    """

    planned: PlannedModels
    target: Backend
    draft: Backend | None
    draft_window: ContextWindow
    prefix_cache: PrefixCache
    draft_prefix_cache: PrefixCache | None
    pair_statistics: PairStatistics

    def __init__(self) -> None:
        self._closing = ExitStack()
        self._learnt: PairStatistics | None = None
        # One attribute, as any thread reads it: (traffic of closed models, the open target).
        self._traffic: tuple[TransferStats, Backend | None] = (TransferStats(), None)

    @property
    def plan(self) -> RunPlan:
        return self.planned.plan

    @property
    def options(self) -> RunOptions:
        """The options of the run, without a draft that the plan leaves out."""
        return self.planned.options

    @property
    def backends(self) -> tuple[Backend, ...]:
        """The target, and the draft if there is one."""
        return (self.target,) if self.draft is None else (self.target, self.draft)

    @property
    def transfer_stats(self) -> TransferStats:
        """Traffic of the target's weights since the first load; any thread may read it."""
        past, target = self._traffic
        return past if target is None else past.plus(target.transfer_stats)

    def load(self, planned: PlannedModels, progress: Any = None) -> None:
        """Load the models as planned; what was opened is closed if a later part fails."""
        options = planned.options
        with ExitStack() as stack:
            opened = (planned.target, planned.draft)
            sources = [model.source for model in opened if model is not None]
            saved_statistics = SavedStatistics(planned.plan, sources)
            stack.callback(saved_statistics.save)  # last, when the memory is free again
            target: Backend = stack.enter_context(load_target(planned, options, progress))
            draft, draft_window = load_draft(planned, options, target)
            if draft is not None:
                stack.enter_context(draft)
            self.planned, self.target, self.draft = planned, target, draft
            self.draft_window = draft_window
            self.prefix_cache = _prefix_cache(target, options.max_num_seqs)
            self.draft_prefix_cache = None
            if draft is not None:
                self.draft_prefix_cache = _prefix_cache(draft, options.max_num_seqs)
            self._take_statistics(saved_statistics.pair_statistics)
            self._traffic = self._traffic[0], target
            self._closing = stack.pop_all()

    def _take_statistics(self, pair_statistics: PairStatistics) -> None:
        learnt = self._learnt
        if learnt is not None and (learnt.draft_cost is None) == (self.draft is None):
            pair_statistics.learn_on(learnt)
        self.pair_statistics = self._learnt = pair_statistics

    def close(self) -> None:
        """Free the models and give their memory back to the system. Idempotent."""
        target = self._traffic[1]
        use = TransferStats() if target is None else target.transfer_stats
        self._traffic = self.transfer_stats, None
        self._closing.close()
        give_back_freed()
        # The reads of single experts have no time of their own.
        if use.bytes_streamed and not use.experts_asked and self.options.io_threads is None:
            path = self.planned.target.source.weight_file
            correct_storage(path, use.bytes_streamed, use.read_seconds)


def _prefix_cache(backend: Backend, max_num_seqs: int) -> PrefixCache:
    return PrefixCache(backend, max_num_seqs if backend.limits_sequences else None)
