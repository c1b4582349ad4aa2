"""Plans with a draft that costs more than it gains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from paper_models import PaperModel

from backends.contract.curve import ComputeCurve
from offload.units import GIB, MIB
from specdec.planning import plan as planning
from specdec.planning.plan import OpenedPair, PlannedModels
from specdec.planning.search import Measurements
from specdec.run_options import RunOptions

CURVE = ComputeCurve.linear(1e-12, 1e-15)
TARGET = PaperModel("t", 40, 40 * MIB, kv_bytes_per_token=1000, curve=CURVE)
LARGE = PaperModel("d", 30, 40 * MIB, kv_bytes_per_token=100, curve=CURVE)
SMALL = PaperModel("d", 4, MIB, kv_bytes_per_token=100, curve=CURVE)


def planned(draft: PaperModel, monkeypatch: pytest.MonkeyPatch, **options: Any) -> PlannedModels:
    pair: Any = OpenedPair(SimpleNamespace(source=TARGET), SimpleNamespace(source=draft))
    measurements = Measurements(1e9, TARGET.measure_compute(), draft.measure_compute())
    monkeypatch.setattr(planning, "open_pair", lambda _: pair)
    monkeypatch.setattr(planning, "measure_figures", lambda *_: measurements)
    monkeypatch.setattr(planning, "budget_of_run", lambda _: (2 * GIB + 512 * MIB, "as asked"))
    return planning.plan_models(RunOptions("t", "d", ctx_size=256, **options))


def test_a_draft_that_is_left_out_is_not_loaded_and_one_note_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actual = planned(LARGE, monkeypatch)
    assert (actual.draft, actual.plan.draft_cost_model) == (None, None)
    assert actual.options.draft_model is None
    assert actual.options.spec.spec_type == ("ngram",)
    (note,) = actual.plan.notes
    assert "the draft is left out" in note
    assert "--spec-type draft,ngram" in note
    assert actual.plan.warnings == ()
    assert f"note: {note}" in actual.plan.lines()


@pytest.mark.parametrize("fixed", [{"spec_type": "draft,ngram"}, {"num_draft_tokens": 16}])
def test_a_draft_that_was_fixed_is_loaded_with_a_warning(
    fixed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    actual = planned(LARGE, monkeypatch, **fixed)
    assert actual.draft is not None
    assert actual.plan.notes == ()
    assert any(
        "without the draft it should be faster" in warning for warning in actual.plan.warnings
    )


def test_a_draft_that_pays_is_loaded_and_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    actual = planned(SMALL, monkeypatch)
    assert actual.draft is not None
    assert actual.options.spec.spec_type == ("draft", "ngram")
    assert (actual.plan.notes, actual.plan.warnings) == ((), ())
