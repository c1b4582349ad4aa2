"""Memory plans of VRAM and host: nothing is over-committed in either."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_models import PaperModel

from backends.contract.curve import ComputeCurve
from offload.budget import BudgetExceeded
from offload.units import GIB, MIB
from specdec.config import MAX_DRAFT_TOKENS, SpecConfig
from specdec.drafters.frontier import level_width
from specdec.planning.measurements import Measurements
from specdec.planning.memory.memory_plan import Gpu, MinBudget, Shape
from specdec.planning.memory.planner import MemoryPlanner
from specdec.planning.search import Alternative, Search
from specdec.policy.draft_policy import MAX_AUTO_NODES, DraftPolicy
from specdec.policy.pair_statistics import PairStatistics
from specdec.run_options import RunOptions

BASE_BYTES = 300 * MIB
FAST = ComputeCurve.linear(1e-12, 1e-15)
SLOW = ComputeCurve.linear(1e-8, 1e-9)


def paper(name: str, n_layers: int, tensor_bytes: int, kv_bytes: int = 1000) -> PaperModel:
    return PaperModel(name, n_layers, tensor_bytes, kv_bytes_per_token=kv_bytes, can_use_gpu=True)


BIG, SMALL = paper("t", 40, 40 * MIB), paper("d", 4, 4 * MIB)  # 3.1 GiB, 32 MiB


def gpu(vram_bytes: int, target: PaperModel, draft: PaperModel | None, where: str) -> Gpu:
    on_cpu, on_gpu = draft if "cpu" in where else None, draft if "cuda" in where else None
    return Gpu(vram_bytes, "as asked", target, on_cpu, on_gpu)


def memory_planner(
    vram_bytes: int,
    target: PaperModel = BIG,
    draft: PaperModel | None = SMALL,
    where: str = "cuda",
    **options: object,
) -> MemoryPlanner:
    asked = RunOptions("t", None if draft is None else "d", ctx_size=1024, **options)
    return MemoryPlanner(target, draft, asked, BASE_BYTES, gpu(vram_bytes, target, draft, where))


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 40), st.integers(1, 4), st.integers(1, 20)),
    kv=st.sampled_from([1000, MIB // 4]),
    more=st.tuples(st.integers(0, 1500), st.integers(0, 1500)),
    where=st.sampled_from(["cpu", "cuda"]),
)
def test_every_byte_of_both_is_accounted_for(sizes, kv, more, where):
    target = paper("t", sizes[0], sizes[1] * MIB, kv)
    draft = paper("d", sizes[2], sizes[3] * MIB, kv)
    shape = Shape(8, draft_device=where)
    with pytest.raises(BudgetExceeded, match="VRAM budget") as failure:
        memory_planner(1, target, draft, where).divide(GIB, shape)
    vram = failure.value.smallest_budget_bytes + (more[0] + 4 * sizes[1]) * MIB
    item = memory_planner(vram, target, draft, where)
    with pytest.raises(BudgetExceeded, match="memory budget") as failure:
        item.divide(1, shape)
    # The smallest budgets use the default ring.
    total = failure.value.smallest_budget_bytes + (more[1] + 2 * sizes[1]) * MIB
    memory_plan = item.divide(total, shape)
    plan, on_gpu, host = (
        memory_plan.target,
        dict(memory_plan.vram.table()),
        dict(memory_plan.budget.table()),
    )
    assert plan.is_on_device
    assert sum(on_gpu.values()) == vram
    assert sum(host.values()) == total
    assert min(on_gpu["available"], host["available"]) >= 0
    assert on_gpu["layers"] + on_gpu["slots"] == plan.device_bytes
    assert host["pinned layers"] + host["ring"] == plan.host_bytes
    assert ("draft KV cache" in on_gpu) == (where == "cuda")
    assert ("draft KV cache" in host) == (where == "cpu")
    assert memory_plan.draft.n_moving_layers == 0 or where == "cpu"


def test_the_smallest_budgets_work_and_less_does_not():
    minimum = memory_planner(1)
    with pytest.raises(BudgetExceeded, match="but the VRAM budget has") as failure:
        minimum.divide(4 * GIB, Shape(8, draft_device="cuda"))
    vram = failure.value.smallest_budget_bytes
    item = memory_planner(vram)
    smallest = item.smallest.host_bytes
    memory_plan = item.divide(smallest, Shape(8, draft_device="cuda"))
    assert memory_plan.smallest == MinBudget(smallest, vram)
    for too_small in (memory_planner(vram - 32 * MIB), item):
        budget = 4 * GIB if too_small is not item else smallest - 32 * MIB
        with pytest.raises(BudgetExceeded):
            too_small.divide(budget, Shape(8, draft_device="cuda"))


def test_with_ram_nothing_is_read_and_more_vram_needs_less_of_the_host():
    shape = Shape(8, draft_device="cuda")
    needed = [memory_planner(n * GIB, load_mode="ram").smallest.host_bytes for n in (2, 3, 8)]
    assert needed == sorted(needed, reverse=True)
    assert needed[0] - needed[1] == pytest.approx(GIB, rel=0.1)
    memory_plan = memory_planner(2 * GIB, load_mode="ram").divide(needed[0], shape)
    assert memory_plan.target.streamed_bytes == 0
    with pytest.raises(BudgetExceeded):
        memory_planner(2 * GIB, load_mode="ram").divide(needed[0] - 64 * MIB, shape)


# --- alternatives ---------------------------------------------------------------------------------


def weigh(
    where: str, *, cpu: ComputeCurve = FAST, cuda: ComputeCurve = FAST, vram: int = 2 * GIB
) -> tuple[Alternative, list[Alternative]]:
    asked = RunOptions("t", "d", ctx_size=256, spec_type="draft,ngram")  # it is not left out
    measurements = Measurements(
        1e9,
        PaperModel("t", 1, 1, curve=FAST).measure_compute(),
        PaperModel("d", 1, 1, curve=cpu).measure_compute(),
        PaperModel("d", 1, 1, curve=cuda).measure_compute(),
        10e9,
    )
    item = MemoryPlanner(BIG, SMALL, asked, BASE_BYTES, gpu(vram, BIG, SMALL, where))
    search = Search(item, measurements)
    return search.best(4 * GIB), search.alternatives


def test_the_draft_goes_where_it_is_faster():
    assert weigh("cpu cuda", cpu=SLOW)[0].memory_plan.shape.draft_device == "cuda"
    assert weigh("cpu cuda", cuda=SLOW)[0].memory_plan.shape.draft_device == "cpu"
    assert weigh("cpu", cpu=SLOW)[0].memory_plan.shape.draft_device == "cpu"


def test_a_draft_that_does_not_fit_on_the_gpu_stays_on_the_cpu():
    vram = memory_planner(1, where="cpu").smallest.vram_bytes
    chosen, weighed = weigh("cpu cuda", cpu=SLOW, vram=vram)
    assert chosen.memory_plan.shape.draft_device == "cpu"
    assert {item.memory_plan.shape.draft_device for item in weighed} == {"cpu", None}


def test_copies_set_the_pace_where_nothing_is_read_and_storage_where_it_is():
    chosen, _ = weigh("cuda")
    copied = chosen.target.placement.moved_bytes
    assert chosen.target.placement.streamed_bytes == 0
    assert chosen.target.seconds(1) == pytest.approx(copied / 10e9, rel=0.02)
    assert "draft on the GPU" in chosen.name
    assert "on the GPU" in chosen.name.split(", ")[-1]
    asked = RunOptions("t", None, ctx_size=256)
    item = MemoryPlanner(BIG, None, asked, BASE_BYTES, gpu(GIB, BIG, None, ""))
    measurements = Measurements(
        1e9, PaperModel("t", 1, 1, curve=FAST).measure_compute(), None, None, 10e9
    )
    streamed = Search(item, measurements).best(3 * GIB // 2)
    read = streamed.target.placement.streamed_bytes
    assert read > GIB
    assert streamed.target.seconds(1) == pytest.approx(read / 1e9, rel=0.02)


# --- large trees ----------------------------------------------------------------------------------


def weigh_by_rows(seconds_per_row: float) -> Alternative:
    """A GPU whose arithmetic takes this long for each byte and row; copies take 0.1 s."""
    measurements = Measurements(
        1e9,
        PaperModel("t", 1, 1, curve=ComputeCurve.linear(1e-12, seconds_per_row)).measure_compute(),
        None,
        PaperModel("d", 1, 1, curve=FAST).measure_compute(),
        20e9,
    )
    asked = RunOptions("t", "d", ctx_size=256)
    item = MemoryPlanner(BIG, SMALL, asked, BASE_BYTES, gpu(3 * GIB, BIG, SMALL, "cuda"))
    return Search(item, measurements).best(8 * GIB)


def test_trees_are_as_large_as_copies_hide_them():
    """Beside copies a row costs nothing until arithmetic takes longer than they do."""
    free, dear = weigh_by_rows(1e-15), weigh_by_rows(1e-12)
    assert free.memory_plan.n_drafted >= 4 * MAX_AUTO_NODES
    assert free.target.seconds(1 + MAX_DRAFT_TOKENS) == pytest.approx(
        free.target.seconds(1), rel=0.05
    )
    assert dear.memory_plan.n_drafted <= MAX_AUTO_NODES
    assert dear.target.seconds(1 + MAX_DRAFT_TOKENS) > 2 * dear.target.seconds(1)


def test_the_policy_uses_the_memory_of_a_plan_for_a_gpu():
    alternative = weigh_by_rows(1e-15)
    costs = alternative.target.cost_model(), alternative.draft.cost_model()
    pair_statistics = PairStatistics(*costs, alternative.memory_plan.n_drafted)
    policy = DraftPolicy(SpecConfig(("draft",)), pair_statistics, 4096)
    assert policy.n_nodes == alternative.memory_plan.n_drafted >= 4 * MAX_AUTO_NODES


def parts(where: str, n_drafted: int, **options: object) -> tuple[dict[str, int], dict[str, int]]:
    """Return (host parts, GPU parts)."""
    memory_plan = memory_planner(4 * GIB, where=where, **options).divide(
        8 * GIB, Shape(n_drafted, draft_device=where)
    )
    return dict(memory_plan.budget.table()), dict(memory_plan.vram.table())


def test_logits_of_a_gpu_come_to_the_host():
    row = PaperModel.vocab_size * 8
    for n_drafted in (8, 1023):
        host, _ = parts("cuda", n_drafted, parallel=1)
        assert host["target logits"] == (1 + n_drafted) * row
        assert host["draft logits"] == level_width(n_drafted) * row
        host, _ = parts("cpu", n_drafted, parallel=1)
        assert host["target logits"] == (1 + n_drafted) * row
        assert "draft logits" not in host


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_chains_are_drawn_on_the_host(rule: str):
    host, _ = parts("cuda", 16, acceptance=rule, spec_type="draft", parallel=1)
    assert host["draft probabilities"] == 16 * PaperModel.vocab_size * 8
