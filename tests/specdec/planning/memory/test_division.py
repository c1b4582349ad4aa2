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
from specdec.planning.memory.division import Divider, Shape
from specdec.run_options import RunOptions
from specdec.verification.block import block_walk
from specdec.verification.tree import DraftTree

CTX = 1024


def divider(target: ModelSource, draft: ModelSource | None = None, **options: object) -> Divider:
    name = None if draft is None else "draft"
    return Divider(target, draft, RunOptions("target", name, ctx_size=CTX, **options), 400 * MIB)


def smallest(one: Divider) -> int:
    with pytest.raises(BudgetExceeded) as failure:
        one.divide(1, Shape(8))
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
    one = divider(target, draft)
    least = smallest(one)
    division = one.divide(least + more * MIB, Shape(8))
    table = dict(division.budget.table())
    assert sum(table.values()) == least + more * MIB
    assert table["available"] >= 0
    assert table["pinned layers"] == division.target.resident_bytes
    assert table["ring"] == division.target.ring_bytes
    assert division.draft is not None
    assert table["draft pinned layers"] == division.draft.resident_bytes
    assert table["draft ring"] == division.draft.ring_bytes
    with pytest.raises(BudgetExceeded):
        one.divide(least - 32 * MIB, Shape(8))


def test_a_draft_that_fits_is_held_in_memory_before_any_layer_of_the_target_is_pinned():
    target, draft = PaperModel("t", 40, 40 * MIB), PaperModel("d", 8, 40 * MIB)
    one = divider(target, draft)
    ring = 2 * 80 * MIB  # what the draft takes of the smallest budget
    division = one.divide(smallest(one) + 8 * 80 * MIB - ring, Shape(8))
    assert division.draft.n_streamed_layers == 0
    assert division.target.n_streamed_layers == 40


def test_a_draft_that_does_not_fit_streams_in_part():
    target, draft = PaperModel("t", 40, 40 * MIB), PaperModel("d", 8, 40 * MIB)
    one = divider(target, draft)
    division = one.divide(smallest(one) + 200 * MIB, Shape(8))
    assert division.draft.n_streamed_layers > 0
    assert division.draft.resident_bytes > 0
    assert division.draft.streamed_bytes < 8 * 80 * MIB


def test_a_refusal_says_what_a_shorter_context_and_a_smaller_cache_would_save():
    one = divider(PaperModel("t", 4, MIB))
    with pytest.raises(BudgetExceeded) as failure:
        one.divide(200 * MIB, Shape(8))
    message = str(failure.value)
    assert f"with --ctx-size {CTX // 2} it is" in message
    assert "with --cache-type-k q8_0 --cache-type-v q8_0 it is" in message
    n_needed = -(-failure.value.wanted_bytes // MIB)
    assert f"--ctx-size {CTX // 2} it is {n_needed - CTX // 2 // 4} MiB" in message


def test_ram_takes_no_less_than_the_whole_model_and_mmap_counts_none_of_it():
    target = PaperModel("t", 40, 40 * MIB)
    streamed, ram, mmap = (
        smallest(divider(target, load_mode=mode)) for mode in ("auto", "ram", "mmap")
    )
    assert ram - mmap == pytest.approx(40 * 80 * MIB, abs=32 * MIB)
    assert mmap < streamed < ram
    assert divider(target, load_mode="ram").divide(8 * GIB, Shape(8)).target.n_slots == 0


def test_rejection_sets_memory_aside_for_the_rows_its_chain_was_drawn_from() -> None:
    """Whole rows of float64: at a large vocabulary more than the draft's KV cache."""
    models = PaperModel("target", 6, 8 * MIB), PaperModel("draft", 3, 2 * MIB)

    def n_rows(n_texts: int, depth: int = 256) -> float:
        options = {"acceptance": "rejection", "draft_depth": depth, "parallel": n_texts}
        division = divider(*models, **options).divide(2 * GIB, Shape(200))
        return dict(division.budget.table())["draft probabilities"] / (32000 * 8)

    assert n_rows(1) == 200
    assert n_rows(1, depth=32) == 32
    assert n_rows(4, depth=32) == 4 * 32  # chains of four texts
    assert n_rows(8, depth=32) == 200 + 7 + 7  # that is all that a pass has room for


def test_each_further_text_has_noise_of_its_own() -> None:
    models = PaperModel("target", 6, 8 * MIB), PaperModel("draft", 3, 2 * MIB)
    found = []
    for n_texts in (1, 2, 32):
        division = divider(*models, parallel=n_texts).divide(2 * GIB, Shape(8))
        found.append(dict(division.budget.table())["draft probabilities"])
    assert found[1] - found[0] == 8 * 32000 * 4
    assert found[2] - found[0] == 31 * 8 * 32000 * 4


def test_the_smallest_budget_is_that_of_a_small_tree_whatever_is_planned() -> None:
    one = divider(PaperModel("t", 12, 8 * MIB), PaperModel("d", 3, 2 * MIB))
    least = smallest(one)
    for shape in (Shape(8), Shape(128)):
        assert one.divide(3 * GIB, shape).smallest.host_bytes == least
    one.divide(least, Shape(8))
    alone = one.divide(3 * GIB, Shape(8, draft_device=None)).smallest
    assert alone == one.smallest_alone
    assert alone.host_bytes < least
    one.divide(alone.host_bytes, Shape(8, draft_device=None))


def test_shapes_say_what_the_draft_gets() -> None:
    one = divider(PaperModel("t", 40, 40 * MIB), PaperModel("d", 8, 40 * MIB))
    total = smallest(one) + 16 * 80 * MIB

    def divide(**shape: object) -> tuple[int, int]:
        division = one.divide(total, Shape(8, **shape))
        draft = 0 if division.draft is None else division.draft.host_bytes
        return draft, division.target.streamed_bytes

    whole, none = divide(), divide(draft_device=None)
    assert (whole[0], none[0]) == (8 * 80 * MIB, 0)
    assert whole[1] > none[1]


@pytest.mark.parametrize("draft", [None, PaperModel("draft", 3, 2 * MIB)])
def test_block_verification_sets_memory_aside_for_the_rows_that_it_judges_together(draft) -> None:
    n_drafted, vocab = 40, 32000
    one = divider(
        PaperModel("target", 6, 8 * MIB), draft, acceptance="block", num_draft_tokens=n_drafted,
        draft_depth=256,
    )  # fmt: skip
    planned = dict(one.divide(2 * GIB, Shape(n_drafted)).budget.table())["block verification"]
    tree, q = DraftTree(0), np.full(vocab, 1.0 / vocab)
    for _ in range(n_drafted):
        tree.add(len(tree) - 1, 7, 0.0, draft_probs=q)
    tracemalloc.start()
    try:
        block_walk(tree, lambda _: q.copy(), np.random.default_rng(0))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert n_drafted * vocab * 8 < peak_bytes < planned + 8 * vocab * 8
