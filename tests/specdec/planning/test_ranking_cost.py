"""What the planner adds to a draft model's passes: its drafter's own work."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fake_gpu import install_fake_gpu
from paper_models import PaperModel

from backends.contract.ranking import Ranking
from backends.contract.shared import SharedSource
from backends.contract.source import BackendOptions
from backends.hf.source import HfSource
from backends.timing.measure import ComputeCurve
from specdec.drafters.candidates import CandidateRanker
from specdec.planning import ranking_cost
from specdec.planning.ranking_cost import measure_draft


def test_a_level_is_a_pass_and_the_ranking_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    rank = CandidateRanker.rank

    def timed(self: CandidateRanker, logits: object, places: Sequence[int], width: int) -> object:
        nonlocal now
        assert logits.shape == (len(places), 32000)
        now += 0.1 * len(places)
        return rank(self, logits[:, :10], places, width)

    monkeypatch.setattr(CandidateRanker, "rank", timed)
    monkeypatch.setattr("backends.timing.measure.time.perf_counter", lambda: now)
    ranking_cost.measure_ranking.cache_clear()
    draft = PaperModel("d", 2, 1000, curve=ComputeCurve.linear(1e-6, 0.0))
    compute = measure_draft(draft)
    ranking_cost.measure_ranking.cache_clear()
    head_seconds = draft.head_bytes * 1e-6
    for n_rows in (1, 4, 32):
        assert compute.outer_seconds(n_rows) == pytest.approx(head_seconds + 0.1 * n_rows)


def test_a_draft_on_a_device_ranks_there(monkeypatch: pytest.MonkeyPatch) -> None:
    there = ComputeCurve.linear(0.5, 0.25)
    asked: list[tuple[Ranking, int]] = []

    def measured(self: PaperModel, ranking: Ranking, width: int) -> ComputeCurve:
        asked.append((ranking, width))
        return there

    monkeypatch.setattr(PaperModel, "measure_ranking", measured)
    monkeypatch.setattr(ranking_cost, "measure_ranking", None)  # nothing is timed on the host
    draft = PaperModel("d", 2, 1000, curve=ComputeCurve.linear(0.0, 0.0), can_use_gpu=True)
    for source in (draft, SharedSource(draft)):
        assert measure_draft(source).per_pass == there
    assert [ranking.n_tokens for ranking, _ in asked] == [32000] * 2


def test_a_gpus_ranking_is_timed_on_it(checkpoint_factory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in a process, and the time of every level is counted."""
    install_fake_gpu(monkeypatch)
    source = HfSource(checkpoint_factory("llama"), BackendOptions())
    assert source.measure_ranking(Ranking(96, 0.5), 4) is None
    found = source.on_gpu().measure_ranking(Ranking(96, 0.5), 4)
    assert found is not None
    assert found.seconds(1) > 0
    assert source.on_gpu().measure_ranking(Ranking(96, 0.5), 4) is found
