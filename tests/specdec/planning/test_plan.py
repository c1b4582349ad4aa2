"""Plans with a draft that costs more than it gains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from paper_models import PaperModel

from backends.contract.curve import ComputeCurve
from offload.units import GIB, MIB
from specdec.planning import plan as planning
from specdec.planning import saved_statistics
from specdec.planning.measurements import Measurements
from specdec.planning.plan import OpenedPair, PlannedModels
from specdec.policy.pair_statistics import pair_statistics_of
from specdec.run_options import RunOptions

CURVE = ComputeCurve.linear(1e-12, 1e-15)
TARGET = PaperModel("t", 40, 40 * MIB, kv_bytes_per_token=1000, curve=CURVE)
LARGE = PaperModel("d", 30, 40 * MIB, kv_bytes_per_token=100, curve=CURVE)
MEDIUM = PaperModel("d", 4, 40 * MIB, kv_bytes_per_token=100, curve=CURVE)
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


def save_budgets(
    monkeypatch: pytest.MonkeyPatch, plan: Any, *budgets: float | str, n_steps: float = 8.0
) -> None:
    """Save statistics of several modes of choosing tokens with these exploration budgets, after
    steps with the draft."""
    state_dict = pair_statistics_of(plan.cost_model, plan.draft_cost_model, 16).state_dict()
    draft = [n_steps, n_steps, 2.0 * n_steps]
    choices = [{"1": {"budget": budget, "draft": draft}} for budget in budgets]
    state_dict["acceptance"] = {str(i): {"choices": x} for i, x in enumerate(choices)}
    monkeypatch.setattr(saved_statistics, "load_cached", lambda _: state_dict)


def test_a_draft_that_lost_in_earlier_runs_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    first = planned(MEDIUM, monkeypatch)
    assert first.draft is not None
    save_budgets(monkeypatch, first.plan, -0.6, 0.9)
    later = planned(MEDIUM, monkeypatch)
    assert (later.draft, later.plan.draft_cost_model) == (None, None)
    (note,) = later.plan.notes
    assert note.startswith("the draft is left out: in earlier runs it was slower than plain decod")
    assert planned(MEDIUM, monkeypatch, spec_type="draft,ngram").draft is not None


def test_a_draft_that_gained_in_some_runs_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(MEDIUM, monkeypatch).plan
    for budgets in [(-0.6, 7.0), (1.9,), (), ("x",)]:
        save_budgets(monkeypatch, plan, *budgets)
        assert planned(MEDIUM, monkeypatch).draft is not None
    save_budgets(monkeypatch, plan, -0.6, n_steps=7.0)
    assert planned(MEDIUM, monkeypatch).draft is not None, "too few steps"
