"""The planner compares alternatives, and takes the fastest."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_models import PaperModel

from backends.contract.curve import ComputeCurve
from offload.budget import BudgetExceeded
from offload.units import GIB, MIB
from specdec.config import SpecConfig
from specdec.planning.measurements import Measurements
from specdec.planning.memory.planner import MemoryPlanner
from specdec.planning.search import Alternative, Search
from specdec.policy.assumptions import (
    ASSUMED_LEVEL_ACCEPTANCE,
    ASSUMED_TOKENS_PER_PASS,
    best_depth,
    expected_tokens,
    likely_levels,
)
from specdec.run_options import RunOptions

FREE = ComputeCurve.linear(1e-12, 1e-15)
"""Curve of a machine whose arithmetic costs next to nothing."""


BASE_BYTES = 300 * MIB
"""Base memory of a fresh process: this one's depends on earlier tests."""


def weigh(
    target: PaperModel,
    draft: PaperModel | None,
    total_bytes: int,
    *,
    compute: ComputeCurve = FREE,
    storage: float = 1e9,
    **options: object,
) -> tuple[Alternative, list[Alternative]]:
    asked = RunOptions("t", None if draft is None else "d", ctx_size=256, **options)
    measurements = Measurements(
        storage,
        PaperModel("t", 1, 1, curve=compute).measure_compute(),
        None if draft is None else PaperModel("d", 1, 1, curve=compute).measure_compute(),
    )
    search = Search(MemoryPlanner(target, draft, asked, base_bytes=BASE_BYTES), measurements)
    return search.best(total_bytes), search.alternatives


BIG = PaperModel("t", 40, 40 * MIB, kv_bytes_per_token=1000)  # 3.1 GiB
SMALL_DRAFT = PaperModel("d", 4, MIB, kv_bytes_per_token=100)


def test_memory_is_planned_for_the_largest_tree_if_tokens_are_free():
    chosen, weighed = weigh(BIG, SMALL_DRAFT, 2 * GIB)
    assert chosen.memory_plan.n_drafted == 127
    assert chosen in weighed
    plain = [item for item in weighed if item.draft is None]
    assert len(plain) == 1
    assert plain[0].memory_plan.n_drafted == 0
    assert plain[0].tokens_per_second < chosen.tokens_per_second
    assert chosen.target.placement.n_slots > 0


def test_the_tree_is_small_if_tokens_are_costly():
    slow = ComputeCurve.linear(1e-10, 2e-10)
    chosen, _ = weigh(BIG, SMALL_DRAFT, 2 * GIB, compute=slow)
    assert chosen.n_tree <= 8
    assert chosen.memory_plan.n_drafted <= 64


def test_nothing_weighed_is_much_faster_than_what_is_chosen():
    for total in (1, 2):
        for storage in (2e8, 4e9):
            chosen, weighed = weigh(BIG, SMALL_DRAFT, total * GIB, storage=storage)
            best = max(item.tokens_per_second for item in weighed)
            assert chosen.tokens_per_second > 0.95 * best


def test_a_block_is_one_run_of_the_draft_whatever_the_depth():
    slow = ComputeCurve.linear(1e-10, 2e-12)
    measurements = Measurements(
        1e9,
        PaperModel("t", 1, 1, curve=slow).measure_compute(),
        PaperModel("d", 1, 1, curve=slow).measure_compute(),
    )
    asked = RunOptions("t", "d", ctx_size=256)
    planner = MemoryPlanner(BIG, SMALL_DRAFT, asked, base_bytes=BASE_BYTES)
    levels = Search(planner, measurements).best(2 * GIB)
    draft = measurements.draft
    assert draft is not None
    with_block = replace(measurements, draft=replace(draft, block_size=8))
    block = Search(planner, with_block).best(2 * GIB)
    assert levels.draft is not None
    assert block.draft is not None
    assert levels.drafting_seconds == levels.depth * levels.draft.seconds(min(levels.n_tree, 32))
    assert block.drafting_seconds == block.draft.seconds(8)
    assert 1 < block.depth <= 7


@pytest.mark.parametrize("total_mib", [3824, 3840, 3856, 3872])
def test_capacity_costs_little_while_unused_memory_holds_layers(total_mib: int):
    """When the target nearly fits, one layer more or less is much of the reads."""
    draft = PaperModel("d", 4, 8 * MIB, kv_bytes_per_token=100_000)
    curve = ComputeCurve.linear(1e-10, 2e-12)
    chosen, weighed = weigh(BIG, draft, total_mib * MIB, compute=curve, storage=2e8)
    minimum = next(item for item in weighed if item.memory_plan.n_drafted == 7)
    assert chosen.speeds[1] >= 0.95 * minimum.speeds[1]


def test_no_memory_plan_is_listed_twice():
    _, weighed = weigh(BIG, SMALL_DRAFT, 2 * GIB)
    names = [item.name for item in weighed]
    assert len(names) == len(set(names))


def test_what_the_user_fixed_stays():
    chosen, weighed = weigh(BIG, SMALL_DRAFT, 2 * GIB, num_draft_tokens=5, prefetch_depth=4)
    assert (chosen.n_tree, chosen.memory_plan.n_drafted) == (5, 5)
    assert chosen.target.placement.n_slots == 4
    assert {item.target.placement.n_slots for item in weighed} == {4}
    chosen, weighed = weigh(BIG, None, 2 * GIB, spec_type="none")
    assert all(item.memory_plan.n_drafted == 0 for item in weighed)
    assert chosen.tokens_per_pass == 1


def test_a_target_that_fits_has_no_ring_to_choose():
    chosen, weighed = weigh(PaperModel("t", 4, 4 * MIB), SMALL_DRAFT, 2 * GIB)
    assert {item.target.placement.n_slots for item in weighed} == {0}
    assert chosen.target.placement.streamed_bytes == 0


LARGE_DRAFT = PaperModel("d", 30, 40 * MIB, kv_bytes_per_token=100)  # 2.3 GiB


def speed_alone(weighed: list[Alternative]) -> float:
    (plain,) = (item for item in weighed if item.draft is None and not item.memory_plan.n_drafted)
    return plain.tokens_per_second


def test_a_draft_that_costs_more_than_it_gains_is_left_out():
    chosen, weighed = weigh(BIG, LARGE_DRAFT, 2 * GIB)
    with_draft = [item for item in weighed if item.draft is not None]
    best = max(item.tokens_per_second for item in with_draft)
    assert speed_alone(weighed) > 1.05 * best
    assert chosen.draft is None
    assert chosen.memory_plan.n_drafted >= 8, "n-grams go on drafting"
    assert len({item.name for item in weighed}) == len(weighed)


def test_a_draft_that_costs_little_memory_is_retained_even_if_drafting_should_not_pay():
    rows_cost_most = ComputeCurve.linear(1e-10, 5e-9)
    chosen, weighed = weigh(BIG, SMALL_DRAFT, 2 * GIB, compute=rows_cost_most)
    assert speed_alone(weighed) > 1.05 * chosen.tokens_per_second, "drafting should not pay"
    assert chosen.plain_tokens_per_second > 0.95 * speed_alone(weighed)
    assert chosen.draft is not None


@pytest.mark.parametrize(
    "fixed",
    [{"spec_type": "draft,ngram"}, {"spec_type": "draft"}, {"num_draft_tokens": 16}]
    + [{"acceptance": "rejection"}],
)
def test_a_draft_that_the_user_fixed_is_retained(fixed: dict[str, object]) -> None:
    chosen, weighed = weigh(BIG, LARGE_DRAFT, 2 * GIB, **fixed)
    assert chosen.draft is not None
    assert speed_alone(weighed) > 1.05 * chosen.tokens_per_second


def test_a_draft_is_retained_if_the_target_has_no_use_for_its_memory():
    slow = ComputeCurve.linear(1e-10, 2e-10)
    target = PaperModel("t", 4, 40 * MIB)
    chosen, weighed = weigh(target, PaperModel("d", 4, 39 * MIB), 2 * GIB, compute=slow)
    assert speed_alone(weighed) > 1.05 * chosen.tokens_per_second
    assert chosen.draft is not None


@given(st.integers(1, 30), st.integers(1, 60), st.floats(0.8, 3.0), st.floats(2e8, 4e9))
@settings(max_examples=8, deadline=None)
def test_what_streams_is_never_predicted_much_slower_than_without_a_draft(
    n_layers: int, layer_mib: int, total_gib: float, storage: float
) -> None:
    draft = PaperModel("d", n_layers, layer_mib * MIB, kv_bytes_per_token=100)
    try:
        chosen, weighed = weigh(BIG, draft, int(total_gib * GIB), storage=storage)
    except BudgetExceeded:
        return
    if any(item.draft is not None for item in weighed):
        assert chosen.tokens_per_second > 0.95 * speed_alone(weighed)


def test_what_does_not_fit_is_refused_with_the_smallest_budget():
    with pytest.raises(BudgetExceeded) as failure:
        weigh(BIG, SMALL_DRAFT, 100 * MIB)
    smallest = failure.value.smallest_budget_bytes
    chosen, _ = weigh(BIG, SMALL_DRAFT, smallest + 16 * MIB)
    assert chosen.memory_plan.smallest.host_bytes <= smallest + 16 * MIB


@given(st.integers(0, 300), st.integers(0, 40))
def test_larger_trees_are_assumed_to_gain_more(n_drafted, depth):
    tokens = expected_tokens(n_drafted, depth)
    assert 1.0 <= tokens <= ASSUMED_TOKENS_PER_PASS[-1][1]
    assert tokens <= 1 + min(n_drafted, depth)
    assert expected_tokens(n_drafted + 1, depth) >= tokens
    assert expected_tokens(n_drafted, depth + 1) >= tokens


def test_the_assumption_is_as_measured_where_levels_abound():
    for n_drafted, tokens in ASSUMED_TOKENS_PER_PASS:
        assert expected_tokens(n_drafted, 32) == pytest.approx(tokens)


@pytest.mark.parametrize("width", [1, 2, 8])
def test_the_levels_of_the_likeliest_tree(width: int):
    """All nodes with that many levels are sorted for comparison."""
    right = ASSUMED_LEVEL_ACCEPTANCE
    ranks = [right * (1 - right) ** rank for rank in range(width)]
    level, actual = [1.0], []
    for depth in range(1, 8):
        level = [parent * chance for parent in level for chance in ranks][:5000]
        actual += [(chance, -depth) for chance in level]
    for n_drafted in range(1, 8):
        best = sorted(actual, reverse=True)[:n_drafted]
        assert likely_levels(n_drafted, width) == max(-depth for _, depth in best)
    assert likely_levels(0, width) == 0


def test_levels_that_take_long_are_fewer():
    draft = PaperModel("d", 4, 40 * MIB, kv_bytes_per_token=100)  # a tenth of the target
    slow_curve = ComputeCurve.linear(1e-9, 0.0)
    quick, _ = weigh(BIG, draft, 2 * GIB, num_draft_tokens=16)
    slow, _ = weigh(BIG, draft, 2 * GIB, num_draft_tokens=16, compute=slow_curve)
    assert 1 <= slow.depth < quick.depth == likely_levels(16, 8)
    level = slow.draft.seconds(16)
    assert slow.drafting_seconds == pytest.approx(slow.depth * level)


@given(st.integers(1, 300), st.integers(1, 8), st.floats(1e-3, 100.0))
def test_levels_are_enough_for_a_number_that_the_user_fixed(n: int, width: int, level: float):
    """Levels do not depend on their duration; they go up to the deepest."""
    spec = SpecConfig(num_draft_tokens=n, tree_width=width)
    depth = best_depth(spec, 32, 1.0, level)
    expert_cache = sum(width**k for k in range(1, depth + 1))
    assert expert_cache >= n or depth == 32
    free = best_depth(SpecConfig(tree_width=width), 32, 1.0, level)
    assert depth == free or sum(width**k for k in range(1, depth)) < n  # no deeper than needed
