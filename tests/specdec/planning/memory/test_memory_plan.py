"""Two models in one budget: nothing is over-committed, and the draft's layers come first."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_models import PaperModel

from backends.contract.source import ModelSource
from offload.budget import BudgetExceeded
from offload.units import GIB, MIB
from specdec.planning.memory.memory_plan import Shape
from specdec.planning.memory.planner import MemoryPlanner
from specdec.planning.plan import for_recurrent
from specdec.run_options import RunOptions
from specdec.verification.block import verify_block
from specdec.verification.tree import DraftTree

CTX = 1024


def memory_planner(
    target: ModelSource, draft: ModelSource | None = None, **options: object
) -> MemoryPlanner:
    name = None if draft is None else "draft"
    return MemoryPlanner(
        target, draft, RunOptions("target", name, ctx_size=CTX, **options), 400 * MIB
    )


def smallest(item: MemoryPlanner) -> int:
    with pytest.raises(BudgetExceeded) as failure:
        item.divide(1, Shape(8))
    return failure.value.smallest_budget_bytes


@settings(max_examples=40, deadline=None)
@given(
    n_layers=st.tuples(st.integers(1, 12), st.integers(1, 6)),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    overhead=st.integers(0, 4),
    more=st.integers(0, 1500),
)
def test_every_byte_is_accounted_for(n_layers, sizes, overhead, more):
    target = PaperModel("t", n_layers[0], sizes[0] * MIB, overhead * MIB)
    draft = PaperModel("d", n_layers[1], sizes[1] * MIB, overhead * MIB)
    item = memory_planner(target, draft)
    minimum = smallest(item)
    memory_plan = item.divide(minimum + more * MIB, Shape(8))
    table = dict(memory_plan.budget.table())
    assert sum(table.values()) == minimum + more * MIB
    assert table["available"] >= 0
    assert table["pinned layers"] == memory_plan.target.resident_bytes
    assert table["ring"] == memory_plan.target.ring_bytes
    assert memory_plan.draft is not None
    assert table["draft pinned layers"] == memory_plan.draft.resident_bytes
    assert table["draft ring"] == memory_plan.draft.ring_bytes
    with pytest.raises(BudgetExceeded):
        item.divide(minimum - 32 * MIB, Shape(8))


def test_a_draft_that_fits_is_resident_before_any_layer_of_the_target_is_pinned():
    target, draft = PaperModel("t", 40, 40 * MIB), PaperModel("d", 8, 40 * MIB)
    item = memory_planner(target, draft)
    ring = 2 * 80 * MIB  # the draft's share of the smallest budget
    memory_plan = item.divide(smallest(item) + 8 * 80 * MIB - ring, Shape(8))
    assert memory_plan.draft.n_streamed_layers == 0
    assert memory_plan.target.n_streamed_layers == 40


def test_a_draft_that_does_not_fit_streams_in_part():
    target, draft = PaperModel("t", 40, 40 * MIB), PaperModel("d", 8, 40 * MIB)
    item = memory_planner(target, draft)
    memory_plan = item.divide(smallest(item) + 200 * MIB, Shape(8))
    assert memory_plan.draft.n_streamed_layers > 0
    assert memory_plan.draft.resident_bytes > 0
    assert memory_plan.draft.streamed_bytes < 8 * 80 * MIB


def test_a_refusal_says_what_a_shorter_context_and_a_smaller_cache_would_save():
    item = memory_planner(PaperModel("t", 4, MIB))
    with pytest.raises(BudgetExceeded) as failure:
        item.divide(200 * MIB, Shape(8))
    message = str(failure.value)
    assert f"with ctx_size={CTX // 2} it is" in message
    assert "with cache_type_k='q8_0' cache_type_v='q8_0' it is" in message
    n_needed = -(-failure.value.requested_bytes // MIB)
    assert f"ctx_size={CTX // 2} it is {n_needed - CTX // 2 // 4} MiB" in message


def test_a_refusal_names_a_context_that_fits():
    item = memory_planner(PaperModel("t", 4, MIB))
    with pytest.raises(BudgetExceeded) as failure:
        item.divide(200 * MIB, Shape(8))
    n_quarter = -(-failure.value.requested_bytes // MIB) - 3 * CTX // 4 // 4
    with pytest.raises(BudgetExceeded) as failure:
        item.divide(n_quarter * MIB, Shape(8))
    assert f"; with ctx_size={CTX // 4} it is {n_quarter} MiB;" in str(failure.value)


class PaperHybrid(PaperModel):
    """A model with 50 MiB of recurrent states for each sequence."""

    def state_bytes(self, n_sequences: int, max_nodes: int) -> int:
        return n_sequences * 50 * MIB + max_nodes


def test_states_are_reserved_for_each_sequence() -> None:
    item = memory_planner(PaperHybrid("t", 4, MIB), parallel=4)
    table = dict(item.divide(2 * GIB, Shape(8)).budget.table())
    assert 200 * MIB < table["target recurrent states"] < 201 * MIB
    with pytest.raises(BudgetExceeded) as failure:
        item.divide(200 * MIB, Shape(8))
    n_with_two = int(str(failure.value).split("with parallel=2 it is ")[1].split(" MiB")[0])
    assert n_with_two <= failure.value.requested_bytes // MIB - 99
    with pytest.raises(BudgetExceeded) as failure:
        memory_planner(PaperModel("t", 4, MIB), parallel=4).divide(200 * MIB, Shape(8))
    assert "--parallel" not in str(failure.value)


@pytest.mark.parametrize(
    ("budget", "asked", "expected"),
    [(16 * GIB, None, 8), (2 * GIB, None, 4), (1 * GIB, None, 2), (300 * MIB, None, 1)]
    + [(300 * MIB, 4, 4)],
)
def test_so_many_sequences_run_as_have_their_states_in_an_eighth(
    budget: int, asked: int | None, expected: int
) -> None:
    options = RunOptions("target", parallel=asked)
    hybrid = PaperHybrid("t", 4, MIB)  # 50 MiB of states for each sequence
    assert for_recurrent(options, hybrid, budget).max_num_seqs == expected
    assert for_recurrent(options, PaperModel("t", 4, MIB), budget).max_num_seqs == (asked or 16)


def test_ram_takes_no_less_than_the_whole_model_and_mmap_counts_none_of_it():
    target = PaperModel("t", 40, 40 * MIB)
    streamed, ram, mmap = (
        smallest(memory_planner(target, load_mode=mode)) for mode in ("auto", "ram", "mmap")
    )
    assert ram - mmap == pytest.approx(40 * 80 * MIB, abs=32 * MIB)
    assert mmap < streamed < ram
    assert memory_planner(target, load_mode="ram").divide(8 * GIB, Shape(8)).target.n_slots == 0


def test_rejection_reserves_memory_for_the_rows_its_chain_was_drawn_from() -> None:
    """Whole rows of float64: with a large vocabulary more than the draft's KV cache."""
    models = PaperModel("target", 6, 8 * MIB), PaperModel("draft", 3, 2 * MIB)

    def num_tokens(num_seqs: int, depth: int = 256) -> float:
        options = {"acceptance": "rejection", "draft_depth": depth, "parallel": num_seqs}
        memory_plan = memory_planner(*models, **options).divide(2 * GIB, Shape(200))
        return dict(memory_plan.budget.table())["draft probabilities"] / (32000 * 8)

    assert num_tokens(1) == 200
    assert num_tokens(1, depth=32) == 32
    assert num_tokens(4, depth=32) == 4 * 32  # chains of four sequences
    assert num_tokens(8, depth=32) == 200 + 7 + 7  # all that a pass has memory for


def test_each_further_sequence_has_noise_of_its_own() -> None:
    models = PaperModel("target", 6, 8 * MIB), PaperModel("draft", 3, 2 * MIB)
    actual = []
    for num_seqs in (1, 2, 32):
        memory_plan = memory_planner(*models, parallel=num_seqs).divide(2 * GIB, Shape(8))
        actual.append(dict(memory_plan.budget.table())["draft probabilities"])
    assert actual[1] - actual[0] == 8 * 32000 * 4
    assert actual[2] - actual[0] == 31 * 8 * 32000 * 4


def test_the_smallest_budget_is_that_of_a_small_tree_whatever_is_planned() -> None:
    item = memory_planner(PaperModel("t", 12, 8 * MIB), PaperModel("d", 3, 2 * MIB))
    minimum = smallest(item)
    for shape in (Shape(8), Shape(128)):
        assert item.divide(3 * GIB, shape).smallest.host_bytes == minimum
    item.divide(minimum, Shape(8))
    alone = item.divide(3 * GIB, Shape(8, draft_device=None)).smallest
    assert alone == item.smallest_alone
    assert alone.host_bytes < minimum
    item.divide(alone.host_bytes, Shape(8, draft_device=None))


def test_shapes_say_what_the_draft_gets() -> None:
    item = memory_planner(PaperModel("t", 40, 40 * MIB), PaperModel("d", 8, 40 * MIB))
    total = smallest(item) + 16 * 80 * MIB

    def divide(**shape: object) -> tuple[int, int]:
        memory_plan = item.divide(total, Shape(8, **shape))
        draft = 0 if memory_plan.draft is None else memory_plan.draft.host_bytes
        return draft, memory_plan.target.streamed_bytes

    whole, none = divide(), divide(draft_device=None)
    assert (whole[0], none[0]) == (8 * 80 * MIB, 0)
    assert whole[1] > none[1]


@pytest.mark.parametrize("draft", [None, PaperModel("draft", 3, 2 * MIB)])
def test_block_verification_reserves_memory_for_the_rows_that_it_judges_together(draft) -> None:
    n_drafted, vocab = 40, 32000
    item = memory_planner(
        PaperModel("target", 6, 8 * MIB), draft, acceptance="block", num_draft_tokens=n_drafted,
        draft_depth=256,
    )  # fmt: skip
    planned = dict(item.divide(2 * GIB, Shape(n_drafted)).budget.table())["block verification"]
    tree, q = DraftTree(0), np.full(vocab, 1.0 / vocab)
    for _ in range(n_drafted):
        tree.add(len(tree) - 1, 7, 0.0, draft_probs=q)
    tracemalloc.start()
    try:
        verify_block(tree, lambda _: q.copy(), np.random.default_rng(0))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert n_drafted * vocab * 8 < peak_bytes < planned + 8 * vocab * 8
