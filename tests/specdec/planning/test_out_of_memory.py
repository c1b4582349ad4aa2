"""A draft that was suggested and does not fit is left out, with one note; one that was required is
refused. Any kind of memory may be short."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_models import PaperModel

from backends.contract.curve import ComputeCurve
from offload.budget import BudgetExceeded
from offload.units import GIB, MIB
from specdec.planning.measurements import Measurements
from specdec.planning.memory.memory_plan import Gpu
from specdec.planning.memory.planner import MemoryPlanner
from specdec.planning.plan import OpenedPair, make_plan
from specdec.planning.run_plan import RunPlan
from specdec.run_options import RunOptions

CURVE = ComputeCurve.linear(1e-12, 1e-15)
BASE_BYTES = 300 * MIB
PLENTY = 64 * GIB
DEMANDED = {"spec_type": "draft,ngram"}


class Paper(PaperModel):
    """A model with these activations, logits included, and rows of a vocabulary."""

    def __init__(self, name: str, *sizes: int, scratch: int = 20 * MIB, **more: Any) -> None:
        super().__init__(name, *sizes, curve=CURVE, can_use_gpu=True, **more)
        self._scratch_bytes = scratch

    def scratch_bytes(self, ctx_size: int, max_num_tokens: int, max_nodes: int) -> int:
        return self._scratch_bytes


TARGET = Paper("t", 20, 4 * MIB, kv_bytes_per_token=1000)


@dataclass(frozen=True)
class Case:
    """A draft, and its planning options."""

    draft: PaperModel
    options: dict[str, Any] = field(default_factory=dict)
    ledger: str = "memory"
    gpu: tuple[str, ...] = ()
    """Devices that a draft beside a GPU may run on; empty: none."""


def draft(n_layers: int = 2, tensor_bytes: int = MIB, kv: int = 100, **more: Any) -> Paper:
    return Paper("d", n_layers, tensor_bytes, kv_bytes_per_token=kv, **more)


CASES = {
    "weights": Case(draft(4, 32 * MIB)),
    "one large layer": Case(draft(1, 60 * MIB)),
    "KV of the context": Case(draft(kv=100_000), {"ctx_size": 4096}),
    "KV of several texts": Case(draft(kv=100_000), {"ctx_size": 512, "kv_tokens": 8192}),
    "compute buffers": Case(draft(scratch=200 * MIB)),
    "rows of many texts": Case(draft(), {"parallel": 64, "acceptance": "rejection"}),
    "rows that a chain was drawn from": Case(draft(), {"acceptance": "block"}),
    "a tree of a fixed size": Case(draft(), {"num_draft_tokens": 200}),
    "branches of a tree": Case(draft(), {"tree_width": 1024}),
    "a ring of a fixed depth": Case(draft(4, 32 * MIB), {"prefetch_depth": 4}),
    "a target held in memory": Case(draft(4, 32 * MIB), {"load_mode": "ram"}),
    "a target left to the page cache": Case(draft(4, 32 * MIB), {"load_mode": "mmap"}),
    "beams": Case(draft(4, 32 * MIB), {"num_beams": 4}),
    "a window": Case(draft(4, 32 * MIB), {"draft_window": 64}),
    "a device that was named": Case(draft(4, 32 * MIB), {"draft_device": "cpu"}),
    "a small tree": Case(draft(4, 32 * MIB), {"num_draft_tokens": 1}),
    "weights in VRAM": Case(draft(4, 32 * MIB), {}, "VRAM", ("cuda",)),
    "KV in VRAM": Case(draft(kv=100_000), {"ctx_size": 4096}, "VRAM", ("cuda",)),
    "compute buffers in VRAM": Case(draft(scratch=200 * MIB), {}, "VRAM", ("cuda",)),
    "several sequences in VRAM": Case(
        draft(kv=100_000), {"ctx_size": 512, "kv_tokens": 8192}, "VRAM", ("cuda",)
    ),
    "host memory beside a GPU": Case(draft(4, 32 * MIB), {}, "memory", ("cpu",)),
    "either of two devices": Case(draft(4, 64 * MIB), {}, "memory", ("cpu", "cuda")),
}


def plan_case(case: Case, total_bytes: int, vram_bytes: int = 0, **more: Any) -> RunPlan:
    options, gpu = asked(case, **more), gpu_of(case, vram_bytes)
    pair: Any = OpenedPair(SimpleNamespace(source=TARGET), SimpleNamespace(source=case.draft))
    compute = TARGET.measure_compute()
    measurements = Measurements(1e9, compute, compute, compute, 10e9)
    return make_plan(options, pair, measurements, total_bytes, "as asked", BASE_BYTES, gpu)


def asked(case: Case, **more: Any) -> RunOptions:
    return RunOptions("t", "d", **{"ctx_size": 256, **case.options, **more})


def gpu_of(case: Case, vram_bytes: int) -> Gpu | None:
    if not case.gpu:
        return None
    where = (case.draft if device in case.gpu else None for device in ("cpu", "cuda"))
    return Gpu(vram_bytes, "as asked", TARGET, *where)


def memory_planner(case: Case, vram_bytes: int = 0, **more: Any) -> MemoryPlanner:
    return MemoryPlanner(
        TARGET, case.draft, asked(case, **more), BASE_BYTES, gpu_of(case, vram_bytes)
    )


def too_little(case: Case) -> tuple[int, int]:
    """(memory, VRAM) with enough for the target alone, and for no draft."""
    vram = memory_planner(case, PLENTY).smallest_alone.vram_bytes if "cuda" in case.gpu else PLENTY
    if case.ledger == "VRAM":
        return PLENTY, vram
    return memory_planner(case, vram).smallest_alone.host_bytes, vram


@pytest.mark.parametrize("name", CASES)
def test_a_suggested_draft_is_left_out_with_one_note_that_names_the_sizes(name: str) -> None:
    case = CASES[name]
    total, vram = too_little(case)
    plan, own = plan_case(case, total, vram), memory_planner(case, vram)
    assert plan.chosen.draft is None
    assert plan.draft_placement is None
    (note,) = plan.notes
    assert note.startswith(f"the draft is left out: the {case.ledger} budget of ")
    for smallest in (own.smallest, own.smallest_alone):
        assert f" {smallest.of(case.ledger) // MIB} MiB" in note
    budget, option = (
        (vram, "--vram-budget") if case.ledger == "VRAM" else (total, "--memory-budget")
    )
    assert f"raise {option}" in note
    assert own.smallest.of(case.ledger) > budget
    assert f"note: {note}" in plan.lines()
    assert plan.warnings == ()


@pytest.mark.parametrize("name", CASES)
def test_a_demanded_draft_is_refused_and_both_budgets_are_named(name: str) -> None:
    case = CASES[name]
    total, vram = too_little(case)
    own = memory_planner(case, vram, **DEMANDED)
    with pytest.raises(BudgetExceeded) as refused:
        plan_case(case, total, vram, **DEMANDED)
    assert refused.value.ledger == case.ledger
    assert refused.value.smallest_budget_bytes == own.smallest.of(case.ledger)
    alone = own.smallest_alone.of(case.ledger) // MIB
    assert f"without the draft it is {alone} MiB" in str(refused.value)


@pytest.mark.parametrize("name", CASES)
def test_with_the_budget_that_the_note_names_the_draft_is_planned(name: str) -> None:
    case = CASES[name]
    smallest, is_vram = memory_planner(case, PLENTY, **DEMANDED).smallest, case.ledger == "VRAM"
    total, vram = (PLENTY, smallest.vram_bytes) if is_vram else (smallest.host_bytes, PLENTY)
    plan = plan_case(case, total, vram, **DEMANDED)
    assert plan.chosen.draft is not None
    assert not plan.notes


def test_budgets_too_small_for_the_target_are_refused_and_both_named() -> None:
    case = CASES["weights"]
    with pytest.raises(BudgetExceeded) as refused:
        plan_case(case, 400 * MIB)
    own = memory_planner(case)
    assert refused.value.smallest_budget_bytes == own.smallest_alone.host_bytes
    with_draft = f"with the draft it is {own.smallest.host_bytes // MIB} MiB"
    assert with_draft in str(refused.value)


def test_a_plan_with_a_draft_says_what_is_enough_without_it() -> None:
    plan = plan_case(CASES["weights"], 2 * GIB)
    with_draft, alone = plan.smallest_budget_bytes // MIB, plan.smallest_without_draft_bytes // MIB
    line = f"smallest budget that works {with_draft} MiB; without the draft {alone} MiB"
    assert line in plan.lines()
    assert plan.to_dict()["smallest_without_draft_bytes"] == alone * MIB < with_draft * MIB


@settings(max_examples=30, deadline=None)
@given(
    st.tuples(st.integers(1, 8), st.integers(1, 40), st.integers(100, 100_000)),
    st.integers(0, 256 * MIB),
    st.integers(0, 900),
    st.sampled_from([{}, {"num_draft_tokens": 16}, {"acceptance": "rejection"}, {"parallel": 32}]),
)
def test_a_suggested_draft_is_never_why_a_run_is_refused(
    sizes: tuple[int, int, int], scratch: int, more_mib: int, options: dict[str, Any]
) -> None:
    case = Case(draft(sizes[0], sizes[1] * MIB, sizes[2], scratch=scratch), options)
    total = memory_planner(case).smallest_alone.host_bytes + more_mib * MIB
    plan = plan_case(case, total)
    assert len(plan.notes) == (1 if plan.chosen.draft is None else 0)
    if any("no memory for it" in note for note in plan.notes):
        with pytest.raises(BudgetExceeded):
            plan_case(case, total, **DEMANDED)
