"""Acceptance statistics of a pair of models, kept in the disk cache from process to process.

The key is what they depend on: the processor, the models, the versions of what computes them, and
the bytes moved in every pass. A lost or broken file is learnt again.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence

from backends.contract.cached_checks import processor
from backends.contract.source import ModelSource
from offload.process.disk_cache import cache_folder, load_cached, save_cached
from specdec.planning.run_plan import RunPlan
from specdec.policy.pair_statistics import pair_statistics_of

_CLASSES_PER_DOUBLING = 4
"""Classes of bytes moved in every pass, per doubling: within one, passes take about as long."""


class SavedStatistics:
    """The statistics of a pair as planned, and the file that caches them.

    sources: the target, and the draft if the plan has one.
    """

    def __init__(self, plan: RunPlan, sources: Sequence[ModelSource]) -> None:
        placements = [p for p in (plan.placement, plan.draft_placement) if p is not None]
        key = (
            processor(),
            os.cpu_count(),
            [source.fingerprint() for source in sources],
            [
                round(_CLASSES_PER_DOUBLING * math.log2(1 + n_bytes))
                for placement in placements
                for n_bytes in (placement.streamed_bytes, placement.moved_bytes)
            ],
        )
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        self._path = cache_folder() / f"pair-{digest}.json"
        costs = plan.cost_model, plan.draft_cost_model
        self.pair_statistics = pair_statistics_of(
            *costs, plan.n_draft_tokens, load_cached(self._path), plan.tree_width
        )
        self._before = self.pair_statistics.state_dict()

    def save(self) -> None:
        """Write the file if the statistics have changed."""
        state_dict = self.pair_statistics.state_dict()
        if state_dict != self._before:
            save_cached(self._path, state_dict, "how often drafts of these models are accepted")
