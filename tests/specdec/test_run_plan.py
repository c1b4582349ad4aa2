"""What `specdec plan` prints, and whether its smallest budget holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_pair import save_model

import specdec
from offload.index import TensorRecord
from offload.plan import LayerWeights, plan_residency
from offload.units import GIB, MIB
from specdec.policy import PassCost
from specdec.run_plan import RunPlan

LAYERS = tuple(
    LayerWeights((TensorRecord(f"{i}", "U8", (MIB,), Path("w"), i * MIB, MIB),)) for i in range(8)
)


def make_plan(available_bytes: int, smallest_bytes: int = 700 * MIB) -> RunPlan:
    return RunPlan(
        budget_bytes=2 * GIB,
        budget_source="as asked",
        parts=(("base", GIB),),
        residency=plan_residency(LAYERS, available_bytes),
        ctx_size=128,
        n_draft_tokens=4,
        pass_cost=PassCost(0.5, 0.1, 0.01),
        storage_bytes_per_second=1e9,
        smallest_budget_bytes=smallest_bytes,
    )


def test_speeds_are_predicted_for_what_streams_only() -> None:
    streamed = "\n".join(make_plan(7 * MIB).lines())
    assert "streamed per pass through" in streamed
    assert "predicted 2.00 tokens/s plain" in streamed
    resident = "\n".join(make_plan(GIB).lines())
    for word in ("predicted", "storage", "slots"):
        assert word not in resident


def test_the_smallest_budget_is_exact_and_readable() -> None:
    assert make_plan(GIB).lines()[-1] == "smallest budget that works 700 MiB"
    large = make_plan(GIB, smallest_bytes=2 * GIB + MIB // 2).lines()[-1]
    assert large == "smallest budget that works 2049 MiB (2.00 GiB)"


def test_the_smallest_budget_is_accepted_later_in_the_same_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = save_model(tmp_path / "model", seed=1)
    smallest = specdec.plan_run(model, ctx_size=256).smallest_budget_bytes
    with specdec.load(model, ctx_size=256, memory_budget=smallest) as llm:
        assert llm.plan.budget_bytes == smallest
