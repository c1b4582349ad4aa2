"""Figures of the machine that passes contradict are not kept."""

from __future__ import annotations

from pathlib import Path

import pytest

import specdec
from offload.process import remembered
from specdec.decoding.stats import PassTime


@pytest.mark.parametrize(
    ("times_planned", "n_passes", "held_bytes", "is_kept"),
    [
        (1.3, 20, 0, True),
        (0.8, 20, 0, True),
        (1.7, 20, 0, False),
        (0.5, 20, 0, False),
        (9.0, 5, 0, True),
        (0.5, 20, 1, True),
        (1.7, 20, 1, False),
    ],
)
def test_figures_are_kept_while_passes_take_what_was_planned(
    small_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    times_planned: float, n_passes: int, held_bytes: int, is_kept: bool,
) -> None:  # fmt: skip
    figure = tmp_path / "figure.json"
    monkeypatch.setattr(remembered, "_in_use", set())
    remembered.remember_figure(figure, {}, "a figure")
    with specdec.load(small_target, ctx_size=64) as llm:
        monkeypatch.setattr(type(llm.target), "held_bytes", held_bytes)
        planned = llm.plan.pass_cost.seconds(4)
        passes = [PassTime(4, times_planned * planned)] * n_passes
        llm.session.check_figures([*passes, PassTime(4, 100 * planned, is_drafting_ahead=True)])
    assert figure.exists() == is_kept
