"""Machine measurements contradicted by passes are not cached."""

from __future__ import annotations

from pathlib import Path

import pytest

import specdec
from offload.process import disk_cache
from specdec.engine.session_statistics import check_pass_times
from specdec.metrics.stats import MeasuredPass


@pytest.mark.slow_except(1)
@pytest.mark.parametrize(
    ("times_planned", "n_passes", "has_pinned", "is_retained"),
    [
        (1.3, 20, False, True),
        (0.8, 20, False, True),
        (1.7, 20, False, False),
        (0.5, 20, False, False),
        (9.0, 5, False, True),
        (0.5, 20, True, True),
        (1.7, 20, True, False),
    ],
)
def test_measurements_stay_cached_while_passes_take_as_planned(
    small_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    times_planned: float, n_passes: int, has_pinned: bool, is_retained: bool,
) -> None:  # fmt: skip
    figure = tmp_path / "figure.json"
    monkeypatch.setattr(disk_cache, "_in_use", set())
    disk_cache.save_cached_measurement(figure, {}, "a figure")
    with specdec.load(small_target, ctx_size=64) as llm:
        planned = llm.plan.cost_model.seconds(4)
        # Pinned while they ran, whatever is pinned after the last one.
        passes = [MeasuredPass(4, times_planned * planned, has_pinned=has_pinned)] * n_passes
        ahead = MeasuredPass(4, 100 * planned, is_drafting_ahead=True)
        check_pass_times(llm.plan.cost_model, [*passes, ahead])
    assert figure.exists() == is_retained
