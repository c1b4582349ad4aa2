"""What a pair's steps have taught, kept in the cache folder from one process to the next.

The key is all that decides over it: the processor, the models and the versions of what computes
them, and how much memory they have. A file that is lost or broken is only learnt again.
"""

from __future__ import annotations

import hashlib
import math
import os

from backends.contract.cached_checks import processor
from offload.process.disk_cache import cache_folder, load_cached, save_cached
from specdec.planning.plan import PlannedModels
from specdec.policy.acceptance_statistics import acceptance_statistics_of

_BUDGETS_PER_DOUBLING = 4
"""Classes of memory budgets: within a fifth the same layers stay, and passes take about as long."""


class SavedStatistics:
    """The experience of a loaded pair, and the file that it comes from and goes to."""

    def __init__(self, planned: PlannedModels) -> None:
        plan = planned.plan
        models = [planned.target] if planned.draft is None else [planned.target, planned.draft]
        key = (
            processor(),
            os.cpu_count(),
            [model.source.fingerprint() for model in models],
            [
                round(_BUDGETS_PER_DOUBLING * math.log2(1 + n_bytes))
                for n_bytes in (plan.budget_bytes, plan.vram_budget_bytes)
            ],
        )
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        self._path = cache_folder() / f"pair-{digest}.json"
        costs = plan.cost_model, plan.draft_cost_model
        self.acceptance_statistics = acceptance_statistics_of(
            *costs, plan.n_draft_tokens, load_cached(self._path)
        )
        self._before = self.acceptance_statistics.cached()

    def save(self) -> None:
        """Write the file where the steps have taught anything."""
        cached = self.acceptance_statistics.cached()
        if cached != self._before:
            save_cached(self._path, cached, "what the steps of these models have taught")
