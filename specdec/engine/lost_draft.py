"""Leave out a draft whose tokens are hardly accepted, between two requests.

Its memory then holds layers of the target, which no pass reads any more: on a 6 GB target in
3.5 GiB passes of one token are planned to be 1.18 times as fast without an MTP head as beside it
(docs/benchmarks.md, a useless head).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Protocol

from specdec.metrics.recorder import Totals
from specdec.metrics.stats import EngineStats
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
"""Runs of the draft before it is left out: requests may have been without it."""
_MAX_GAIN = 1.5
"""Gain of a draft above which nothing is planned: that takes up to a second."""


class Loaded(Protocol):
    """A session, as far as its draft is concerned."""

    models: LoadedModels
    totals: Totals

    def load_again(self, planned: PlannedModels) -> None: ...


class LostDraft:
    """Compare loaded models with the plan without their draft, by the tokens that it brought."""

    def __init__(self) -> None:
        self._compared: tuple[RunPlan, PlannedModels] | None = None
        """A plan with the draft, and the same budget's without."""

    def check(self, session: Loaded) -> None:
        """Load the models again without their draft if they should be faster.

        Call it in the engine's thread while no request runs. If that fails, the models are as
        before, and one line says why.
        """
        models, stats = session.models, session.totals.stats()
        plan, is_fixed = models.plan, not models.options.may_leave_out_draft
        # Loading again is not tested on a GPU.
        if models.draft is None or is_fixed or plan.device == CUDA:
            return
        gain = max_gain(stats)
        has_tried = stats.generated_tokens >= MIN_TOKENS and stats.draft_runs >= MIN_RUNS
        if not has_tried or gain > _MAX_GAIN:
            return
        try:
            without = self._without_draft(models)
            speed = without.plan.decoding.plain_tokens_per_second
            if speed < PAYS_TO_LEAVE_OUT * gain * plan.decoding.plain_tokens_per_second:
                return
            models.target.set_pinned_bytes(0)
            session.load_again(without)
        except Exception as error:  # libraries may fail, and the requests go on with the draft
            logger.warning("the draft stays loaded, though it hardly drafts anything: %s", error)
        else:
            logger.warning(
                "%d tokens of the draft alone were accepted in %d passes: its memory is used for "
                "the target from now on; --spec-type draft,ngram keeps it",
                stats.accepted_tokens - stats.ngram_hits,
                stats.sequence_passes,
            )

    def _without_draft(self, models: LoadedModels) -> PlannedModels:
        present, planning = models.plan, models.planned.planning
        if self._compared is None or self._compared[0] is not present:
            if planning.takes_memory:
                models.target.set_pinned_bytes(0)
            planned = planning.without_draft().plan(present.budget_bytes, present.budget_source)
            self._compared = present, planned
        return self._compared[1]


def max_gain(stats: EngineStats) -> float:
    """Return an upper bound of the draft's speedup: each accepted token that n-grams had not
    proposed saved a pass, and drafting took no time."""
    return 1.0 + (stats.accepted_tokens - stats.ngram_hits) / max(1, stats.sequence_passes)


def leaving_out_draft(session: weakref.ref[Loaded]) -> Callable[[], None]:
    """Return a function, to be called before the first of several requests, that leaves out the
    session's draft where that pays."""
    lost_draft = LostDraft()

    def check() -> None:
        if (checked := session()) is not None:
            lost_draft.check(checked)

    return check
