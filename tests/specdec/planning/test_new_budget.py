"""Another budget for a loaded run: whether what is loaded stays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from paper_models import PaperModel

from backends.contract.curve import ComputeCurve
from offload.budget import BudgetExceeded
from offload.units import GIB, MIB
from specdec.planning.measurements import Measurements
from specdec.planning.new_budget import adjusted_plan
from specdec.planning.plan import OpenedPair, PlannedModels, Planning
from specdec.run_options import RunOptions

CURVE = ComputeCurve.linear(1e-12, 1e-15)
TARGET = PaperModel("t", 40, 40 * MIB, kv_bytes_per_token=1000, curve=CURVE)
DRAFT = PaperModel("d", 4, MIB, kv_bytes_per_token=100, curve=CURVE)


@pytest.fixture
def planning() -> Planning:
    pair: Any = OpenedPair(SimpleNamespace(source=TARGET), SimpleNamespace(source=DRAFT))
    measurements = Measurements(1e9, TARGET.measure_compute(), DRAFT.measure_compute())
    return Planning(RunOptions("t", "d", ctx_size=256), pair, measurements, 300 * MIB, None)


def planned(planning: Planning, n_bytes: int) -> PlannedModels:
    return planning.plan(n_bytes, f"{n_bytes // MIB} MiB")


def test_a_somewhat_larger_budget_leaves_more_to_opportunistic_layers(planning: Planning) -> None:
    present = planned(planning, 2 * GIB).plan
    new = adjusted_plan(present, planned(planning, 2 * GIB + 100 * MIB))
    assert new is not None
    assert new.placement == present.placement
    assert new.budget_bytes == sum(n for _, n in new.parts) == 2 * GIB + 100 * MIB
    assert dict(new.parts)["available"] - dict(present.parts)["available"] == 100 * MIB
    assert new.pinnable_bytes >= present.pinnable_bytes + 80 * MIB  # in whole layers
    assert new.budget_source == "2148 MiB"
    assert new.to_dict()["memory_budget_bytes"] == new.budget_bytes
    assert new.lines()


def test_a_budget_below_what_is_loaded_is_another_plan(planning: Planning) -> None:
    present = planned(planning, 2 * GIB).plan
    assert adjusted_plan(present, planned(planning, 2 * GIB - 200 * MIB)) is None


def test_a_larger_budget_may_shrink_again_in_place(planning: Planning) -> None:
    present = planned(planning, 2 * GIB).plan
    larger = adjusted_plan(present, planned(planning, 2 * GIB + 100 * MIB))
    assert larger is not None
    again = adjusted_plan(larger, planned(planning, 2 * GIB))
    assert again is not None
    assert again.parts == present.parts
    assert again.pinnable_bytes == present.pinnable_bytes


def test_models_are_loaded_again_where_that_is_much_faster(planning: Planning) -> None:
    alone = planned(planning, planning.plan(4 * GIB, "").plan.smallest_without_draft_bytes)
    assert alone.draft is None
    assert adjusted_plan(alone.plan, planned(planning, 4 * GIB)) is None


def test_a_budget_that_cannot_hold_the_run_is_refused(planning: Planning) -> None:
    with pytest.raises(BudgetExceeded, match="the smallest budget that works is"):
        planned(planning, 400 * MIB)


def test_a_draft_that_was_left_out_comes_back(planning: Planning) -> None:
    small = planned(planning, planning.plan(4 * GIB, "").plan.smallest_without_draft_bytes)
    assert (small.draft, small.options.draft) == (None, None)
    assert planned(small.planning, 4 * GIB).draft is not None
