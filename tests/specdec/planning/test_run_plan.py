"""The output of `specdec plan`, and runs within its smallest budget."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from paper_models import PaperModel
from tiny_pair import save_model

import specdec
from backends.contract.curve import ComputeCurve
from backends.contract.source import ModelCompute
from offload.budget import MemoryBudget
from offload.placement.plan import plan_placement
from offload.units import GIB, MIB, format_bytes
from specdec.config import SpecConfig
from specdec.planning.measurements import Measurements
from specdec.planning.memory.memory_plan import MemoryPlan, MinBudget, Shape
from specdec.planning.memory.pinnable import SEQUENCE_TOKENS
from specdec.planning.run_plan import RunPlan
from specdec.planning.search import predict
from specdec.planning.what_if.machines import Machines
from specdec.planning.what_if.together import plan_together

LAYERS = PaperModel("t", 8, MIB // 2).layers
CURVE = ComputeCurve.linear(0.1 / (18 * MIB), 0.01 / (18 * MIB))


def make_plan(available_bytes: int, smallest_bytes: int = 700 * MIB, **more: object) -> RunPlan:
    """Plan a target of 8 MiB on storage of 10 MiB/s."""
    divisions = [
        MemoryPlan(
            MemoryBudget(2 * GIB, GIB, 0),
            plan_placement(LAYERS, available_bytes, n_slots=n_slots),
            None,
            128,
            16 * SEQUENCE_TOKENS,
            Shape(4),
            smallest := MinBudget(smallest_bytes),
            smallest,
        )
        for n_slots in (2, 3)
    ]
    measurements = Measurements(10 * MIB, ModelCompute(CURVE, 10 * MIB), None)
    weighed = tuple(
        predict(memory_plan, measurements, SpecConfig(num_draft_tokens=4))
        for memory_plan in divisions
    )
    return RunPlan("as asked", weighed[0], weighed, **more)


def test_speeds_are_predicted_for_what_streams_only() -> None:
    plan = make_plan(6 * MIB)
    streamed = "\n".join(plan.lines())
    assert "streamed per pass through" in streamed
    assert f"predicted {1 / plan.pass_seconds(1):.2f} tokens/s plain" in streamed
    resident = "\n".join(make_plan(GIB).lines())
    for word in ("predicted", "storage", "slots"):
        assert word not in resident


def test_what_was_weighed_is_a_table_and_the_chosen_one_is_marked() -> None:
    lines = make_plan(6 * MIB).lines()
    start = next(i for i, line in enumerate(lines) if line.startswith("weighed"))
    n_grams = "whole KV cache in use and draft tokens from n-grams (assumed):"
    assert lines[start - 1] == f"plans that were weighed, with the {n_grams}"
    rows = lines[start + 1 : start + 3]
    marked = [row for row in rows if row.startswith("* ")]
    assert len(marked) == 1
    assert "2 slots" in marked[0]
    speeds = [float(row.split()[-1]) for row in rows]
    assert speeds == sorted(speeds, reverse=True)


def test_the_reason_why_the_first_row_is_not_chosen_is_shown() -> None:
    plan = make_plan(6 * MIB)
    ranked = sorted(plan.alternatives, key=lambda item: -item.tokens_per_second)
    for chosen in ranked:
        text = "\n".join(replace(plan, chosen=chosen).lines())
        assert ("room for larger trees may cost 5 %" in text) == (chosen is not ranked[0])


def test_the_json_holds_what_was_weighed() -> None:
    plan = make_plan(6 * MIB, warnings=("beware",))
    values = json.loads(json.dumps(plan.to_dict()))
    assert [value["n_slots"] for value in values["weighed"]] == [2, 3]
    assert values["chosen"] == 0
    chosen = values["weighed"][0]
    assert chosen["streamed_bytes_per_pass"] == values["streamed_bytes_per_pass"]
    assert chosen["pass_seconds_1"] == pytest.approx(1 / values["plain_tokens_per_second"])
    assert values["warnings"] == ["beware"]
    assert plan.lines()[-1] == "warning: beware"


def test_memory_without_a_model_is_a_separate_metric() -> None:
    plan = make_plan(6 * MIB)
    budget = plan.chosen.memory_plan.budget
    pinned = [
        budget.reserve(name, 100 * MIB)
        for name in ("draft pinned layers", "ring", "target KV cache", "draft embeddings and head")
    ]
    activations = budget.reserve("target activations", 300 * MIB)
    overhead = 2 * GIB - 400 * MIB - budget.available_bytes
    assert overhead >= 300 * MIB
    assert plan.to_dict()["overhead_bytes"] == overhead
    shown = f"{format_bytes(overhead)}, {overhead / (2 * GIB):.0%} of the budget"
    assert f"libraries, activations and reserves: {shown}" in plan.lines()
    activations.release()
    assert plan.to_dict()["overhead_bytes"] == overhead - 300 * MIB
    pinned[0].release()  # free memory is no overhead
    assert plan.to_dict()["overhead_bytes"] == overhead - 300 * MIB


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


def test_a_context_longer_than_the_models_is_cut_with_a_note(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", seed=1)
    short = specdec.plan_run(model, ctx_size=256)
    assert short.notes == ()
    cut = specdec.plan_run(model, ctx_size=10**6)
    assert cut.ctx_size < 10**6
    assert cut.notes == (f"a context of 1000000 is cut to the model's {cut.ctx_size}",)


def test_several_sequences_share_the_reads_of_a_pass() -> None:
    plan = make_plan(6 * MIB)
    many = plan_together(plan, 16, 8)
    rate = many.throughput.tokens_per_second
    assert rate == many.throughput.plain_tokens_per_second == 16 / plan.pass_seconds(16)
    assert rate > 4 * plan.plain_tokens_per_second
    (line,) = many.lines()
    assert "holds 8192 tokens of all sequences" in line
    assert "16 sequences at once: predicted" in line
    assert "draft tokens" not in line
    draft = make_plan(GIB).chosen.target  # in memory: quick
    drafted = replace(plan, chosen=replace(plan.chosen, draft=draft, depth=4))
    item, many = (plan_together(drafted, n, 8).throughput for n in (1, 16))
    assert item.tree_tokens > 0
    assert item.tokens_per_second > item.plain_tokens_per_second == plan.plain_tokens_per_second
    assert many.tokens_per_second >= many.plain_tokens_per_second
    assert many.tree_tokens <= item.tree_tokens, "rows of sixteen sequences are dear"


def test_several_machines_are_several_times_one() -> None:
    plan = make_plan(6 * MIB)
    actual = Machines(4, plan)
    assert actual.tokens_per_second == 4 * plan.predicted_tokens_per_second
    rate = plan.placement.streamed_bytes / plan.pass_seconds(1)
    assert actual.storage_bytes_per_second == 4 * rate
    first, second = actual.lines()
    assert f"{actual.tokens_per_second:.2f} tokens/s together" in first
    assert "a single sequence is no faster" in first
    assert f"a network disk that all of them read would have to give {4 * rate / 1e9:.2f}" in second
    assert len(Machines(4, make_plan(GIB)).lines()) == 1  # nothing is read
