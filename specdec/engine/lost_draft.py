"""Leave out a draft whose tokens are hardly accepted, between two requests.

Its memory then holds layers of the target, which no pass reads any more: on a 6 GB target in
3.5 GiB passes of one token are planned to be 1.18 times as fast without an MTP head as beside it
(docs/benchmarks.md, a useless head).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from specdec.engine.sequences.request import Request
from specdec.planning.loaded import LoadedModels
from specdec.planning.plan import PlannedModels
from specdec.planning.run_plan import RunPlan
from specdec.planning.search import PAYS_TO_LEAVE_OUT
from specdec.run_options import CUDA

logger = logging.getLogger(__name__)
MIN_TOKENS = 256
"""Tokens of all requests before a draft is left out: one short text of another kind than the draft
was trained for is no reason to lose it."""
MIN_RUNS = 32
"""Runs of the draft before it is left out."""
_MAX_GAIN = 1.5
"""Gain of a draft above which nothing is planned: that takes up to a second."""


class LostDraft:
    """Compare loaded models with the plan without their draft, by the tokens that it brought.

    Used in the engine's thread alone, but for `is_left_out`.
    """

    def __init__(self) -> None:
        self.is_left_out = False
        """True once the draft is left out, or about to be."""
        self.must_stay = False
        """True where loading again failed, or where a benchmark compares modes."""
        self._num_tokens = self._num_passes = self._num_runs = self._num_accepted = 0
        self._compared: tuple[RunPlan, PlannedModels] | None = None
        """A plan with the draft, and the same budget's without."""

    @property
    def max_gain(self) -> float:
        """Upper bound of the draft's speedup: each accepted token that n-grams had not proposed
        saved a pass, and drafting took no time."""
        return 1.0 + self._num_accepted / max(1, self._num_passes)

    def note_finished(self, request: Request) -> None:
        """Count what the draft brought to a request that had it."""
        has_own = request.drafter is not None or request.is_replanned
        if has_own or request.params.num_beams > 1 or "draft" not in request.spec.drafters:
            return
        stats = request.recorder.stats()
        self._num_tokens += stats.generated_tokens
        self._num_passes += stats.passes
        self._num_runs += stats.draft_runs
        self._num_accepted += stats.accepted_tokens - stats.ngram_hits

    def check(self, models: LoadedModels, load: Callable[[PlannedModels], None]) -> None:
        """Load the models again without their draft if they should be faster; call it while no
        request runs.

        load: closes the models and loads them as planned. If that fails, the models are as before,
        and one line says why.
        """
        if not self._may_leave_out(models):
            return
        try:
            without = self._without_draft(models)
            if not self._pays(models, without):
                return
            models.target.set_pinned_bytes(0)
            self.is_left_out = True
            load(without)
        except Exception as error:  # libraries may fail, and the requests go on with the draft
            self.is_left_out, self.must_stay = False, True
            logger.warning("the draft stays loaded, though it hardly drafts anything: %s", error)
        else:
            logger.warning(
                "%d tokens of the draft alone were accepted in %d passes: its memory is used for "
                "the target from now on; --spec-type draft,ngram keeps it",
                self._num_accepted,
                self._num_passes,
            )

    def _may_leave_out(self, models: LoadedModels) -> bool:
        """Return whether the draft hardly drafts, and no option, text or device depends on it."""
        plan, options = models.plan, models.options
        if models.draft is None or self.must_stay or not options.may_leave_out_draft:
            return False
        # Without its drafts a lossy run would emit other tokens. A GPU is not tested.
        if not options.spec.is_lossless or plan.device == CUDA:
            return False
        has_tried = self._num_tokens >= MIN_TOKENS and self._num_runs >= MIN_RUNS
        return has_tried and self.max_gain <= _MAX_GAIN and plan.placement.n_moving_layers > 0

    def _pays(self, models: LoadedModels, without: PlannedModels) -> bool:
        """Return whether the target should be faster without the draft, and lost more time beside
        it so far than it takes to load it and compute its KV again."""
        present, new = models.plan, without.plan
        num_nodes = models.options.max_target_tokens(present.n_draft_tokens)
        if without.options.max_target_tokens(new.n_draft_tokens) < num_nodes:
            return False  # requests may need as many: beams
        speed = new.decoding.plain_tokens_per_second
        beside = self.max_gain * present.decoding.plain_tokens_per_second
        lost_seconds = self._num_tokens * (1.0 / beside - 1.0 / speed)
        read_seconds = new.placement.resident_bytes / new.storage_bytes_per_second
        num_cached = max(1, models.prefix_cache.n_committed)
        again_seconds = read_seconds + new.cost_model.planned_seconds(num_cached)
        return speed > PAYS_TO_LEAVE_OUT * beside and lost_seconds > again_seconds

    def _without_draft(self, models: LoadedModels) -> PlannedModels:
        present, planning = models.plan, models.planned.planning
        if self._compared is None or self._compared[0] is not present:
            if planning.takes_memory:
                models.target.set_pinned_bytes(0)
            planned = planning.without_draft().plan(present.budget_bytes, present.budget_source)
            self._compared = present, planned
        return self._compared[1]
