"""What a pair's rounds have taught, kept in the cache folder from one process to the next.

The key is all that decides over it: the processor, the models and the versions of what computes
them, and how much memory they have. A file that is lost or broken is only learnt again.
"""

from __future__ import annotations

import hashlib
import math
import os

from backends.contract.kept_checks import processor
from offload.process.remembered import cache_folder, recall, remember
from specdec.planning.plan import PlannedModels
from specdec.policy.experience import experience_of

_BUDGETS_PER_DOUBLING = 4
"""Classes of memory budgets: within a fifth the same layers stay, and passes take about as long."""


class KeptExperience:
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
        self.experience = experience_of(*costs, plan.n_draft_tokens, recall(self._path))
        self._before = self.experience.kept()

    def save(self) -> None:
        """Write the file where the rounds have taught anything."""
        kept = self.experience.kept()
        if kept != self._before:
            remember(self._path, kept, "what the rounds of these models have taught")
