"""The planner's cost of a drafter's own work besides the draft model's passes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from paper_models import PaperModel

from backends.contract.curve import ComputeCurve
from specdec.drafters.candidates import CandidateRanker
from specdec.planning import candidate_cost
from specdec.planning.candidate_cost import measure_draft


def test_a_level_is_a_pass_and_the_ranking_of_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    now = 0.0
    rank = CandidateRanker.rank

    def timed(self: CandidateRanker, logits: object, places: Sequence[int], width: int) -> object:
        nonlocal now
        assert logits.shape == (len(places), 32000)
        now += 0.1 * len(places)
        return rank(self, logits[:, :10], places, width)

    monkeypatch.setattr(CandidateRanker, "rank", timed)
    monkeypatch.setattr("backends.timing.measure.time.perf_counter", lambda: now)
    candidate_cost.measure_candidates.cache_clear()
    draft = PaperModel("d", 2, 1000, curve=ComputeCurve.linear(1e-6, 0.0))
    compute = measure_draft(draft)
    candidate_cost.measure_candidates.cache_clear()
    head_seconds = draft.head_bytes * 1e-6
    for num_tokens in (1, 4, 32):
        assert compute.non_layer_seconds(num_tokens) == pytest.approx(
            head_seconds + 0.1 * num_tokens
        )
