"""The KV cache is planned for as many sequences as pay, and a single one is as fast as without."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_models import PaperModel

from backends.contract.curve import ComputeCurve
from offload.budget import BudgetExceeded
from offload.units import GIB, MIB
from specdec.planning.kv_capacity import with_kv_capacity
from specdec.planning.measurements import Measurements
from specdec.planning.memory.pinnable import SEQUENCE_TOKENS
from specdec.planning.memory.planner import MemoryPlanner
from specdec.planning.search import Alternative, Search
from specdec.planning.throughput import fastest_together, predict_throughput
from specdec.run_options import DEFAULT_PARALLEL, RunOptions

CURVE = ComputeCurve.linear(2e-11, 1e-12)
CTX = 2048


def plans(
    target: PaperModel, total_bytes: int, storage: float = 1e9, **options: Any
) -> tuple[Alternative, Alternative, Search]:
    """Return (the plan for one context, the plan with KV for several sequences, the search)."""
    measurements = Measurements(storage, PaperModel("t", 1, 1, curve=CURVE).measure_compute(), None)
    planner = MemoryPlanner(target, None, RunOptions("t", **options), base_bytes=300 * MIB)
    search = Search(planner, measurements)
    best = search.best(total_bytes)
    return best, with_kv_capacity(search, best, total_bytes), search


def alone(plan: Alternative) -> float:
    return plan.decoding(SEQUENCE_TOKENS).target.seconds(1)


def test_a_streamed_model_gets_kv_for_all_sequences_that_may_run() -> None:
    target = PaperModel("t", 40, 60 * MIB, kv_bytes_per_token=100_000)
    best, chosen, search = plans(target, 3 * GIB)
    assert best.memory_plan.kv_tokens == CTX
    assert chosen.memory_plan.kv_tokens == DEFAULT_PARALLEL * SEQUENCE_TOKENS
    parts = dict(chosen.memory_plan.budget.table())
    n_nodes = search.memory_planner.options.target_nodes(chosen.memory_plan.n_drafted)
    assert parts["target KV cache"] == target.kv_bytes(chosen.memory_plan.kv_tokens, n_nodes)
    assert sum(parts.values()) == 3 * GIB
    assert chosen in search.alternatives
    assert f"KV for {chosen.memory_plan.kv_tokens}" in chosen.name
    assert chosen.n_tree == best.n_tree
    together = fastest_together(chosen, DEFAULT_PARALLEL, 4)
    assert together.num_seqs == DEFAULT_PARALLEL
    before = fastest_together(best, DEFAULT_PARALLEL, 4)
    assert before.num_seqs == CTX // SEQUENCE_TOKENS
    assert together.tokens_per_second > 2 * before.tokens_per_second


def test_a_model_that_fits_keeps_fitting() -> None:
    target = PaperModel("t", 40, 30 * MIB, kv_bytes_per_token=400_000)
    for total_bytes in (3800 * MIB, 5000 * MIB, 9000 * MIB):
        best, chosen, _ = plans(target, total_bytes)
        assert not best.target.placement.n_moving_layers
        assert not chosen.target.placement.n_moving_layers
    assert best.memory_plan.kv_tokens < chosen.memory_plan.kv_tokens


def test_what_the_options_fix_stays() -> None:
    target = PaperModel("t", 40, 60 * MIB, kv_bytes_per_token=100_000)
    for options in ({"kv_tokens": 3000}, {"parallel": 1}):
        best, chosen, _ = plans(target, 3 * GIB, **options)
        assert chosen is best
    _, chosen, _ = plans(target, 3 * GIB, parallel=6)
    assert chosen.memory_plan.kv_tokens == 6 * SEQUENCE_TOKENS


def test_rotary_factors_of_a_long_context_are_not_taken_for_many_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = PaperModel("t", 40, 60 * MIB, kv_bytes_per_token=100_000)
    monkeypatch.setattr(target, "can_share_kv", lambda ctx, kv, nodes: kv <= 4096, raising=False)
    best, chosen, _ = plans(target, 3 * GIB)
    assert best.memory_plan.kv_tokens < chosen.memory_plan.kv_tokens <= 4096


@settings(deadline=None, max_examples=30)
@given(
    n_layers=st.integers(8, 60),
    tensor_mib=st.integers(4, 120),
    kv_bytes=st.integers(1000, 10**6),
    total_mib=st.integers(1500, 8000),
    storage=st.sampled_from([2e8, 1e9, 4e9]),
)
def test_the_budget_holds_and_a_single_sequence_is_as_fast(
    n_layers: int, tensor_mib: int, kv_bytes: int, total_mib: int, storage: float
) -> None:
    target = PaperModel("t", n_layers, tensor_mib * MIB, kv_bytes_per_token=kv_bytes)
    try:
        best, chosen, _ = plans(target, total_mib * MIB, storage, ctx_size=512)
    except BudgetExceeded:  # the smallest budget is tested elsewhere
        return
    assert sum(n for _, n in chosen.memory_plan.budget.table()) == total_mib * MIB
    assert min(n for _, n in chosen.memory_plan.budget.table()) >= 0
    assert alone(chosen) <= alone(best) / 0.98
    pinned = chosen.decoding(DEFAULT_PARALLEL * SEQUENCE_TOKENS).target.placement
    slots = pinned.n_streamed_layers - chosen.memory_plan.target.n_streamed_layers
    assert slots <= 0
    num_seqs = chosen.memory_plan.kv_tokens // SEQUENCE_TOKENS
    rate = predict_throughput(chosen, max(1, num_seqs), 4).tokens_per_second
    assert fastest_together(chosen, DEFAULT_PARALLEL, 4).tokens_per_second >= rate * (1 - 1e-12)
