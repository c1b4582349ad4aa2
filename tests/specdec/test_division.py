"""Two models in one budget: nothing is over-committed, and the draft's layers come first."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import Backend
from backends.source import Loading, ModelSource, PassCompute
from offload.budget import BudgetExceeded
from offload.index import TensorRecord
from offload.plan import LayerWeights
from offload.units import GIB, MIB
from specdec.division import Divider
from specdec.options import run_options

CTX = 1024


class PaperModel(ModelSource):
    """A model that exists as figures only."""

    smaller_cache_types = ("q8_0",)
    max_context = 4096
    vocab_size = 32000
    path = weight_file = Path("model.gguf")

    def __init__(self, name: str, n_layers: int, tensor_bytes: int, overhead_bytes: int = 0):
        self.layers = tuple(
            LayerWeights(
                tuple(
                    TensorRecord(f"{name}.{i}.{k}", "F16", (1,), self.path, at, tensor_bytes)
                    for k, at in enumerate(
                        range(2 * i * tensor_bytes, 2 * (i + 1) * tensor_bytes, tensor_bytes)
                    )
                )
            )
            for i in range(n_layers)
        )
        self._overhead_bytes = overhead_bytes

    outer_bytes = 10 * MIB

    def fingerprint(self) -> str:
        raise NotImplementedError

    def streaming_overhead_bytes(self, n_slots: int) -> int:
        return n_slots * self._overhead_bytes

    def kv_bytes(self, ctx_size: int, max_nodes: int, cache_type: str | None = None) -> int:
        return (ctx_size + max_nodes) * MIB // (8 if cache_type else 4)

    def scratch_bytes(self, ctx_size: int, max_rows: int, max_nodes: int) -> int:
        return 20 * MIB

    def measure_compute(self) -> PassCompute:
        raise NotImplementedError

    def load(self, loading: Loading) -> Backend:
        raise NotImplementedError


def divider(target: ModelSource, draft: ModelSource | None = None, **options: object) -> Divider:
    name = None if draft is None else "draft"
    return Divider(target, draft, run_options("target", name, ctx_size=CTX, **options))


def smallest(one: Divider) -> int:
    with pytest.raises(BudgetExceeded) as failure:
        one.divide(1, 8)
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
    division = one.divide(least + more * MIB, 8)
    table = dict(division.budget.table())
    assert sum(table.values()) == least + more * MIB
    assert table["available"] >= 0
    assert table["pinned layers"] == division.target.resident_bytes
    assert table["ring"] == division.target.ring_bytes
    assert division.draft is not None
    assert table["draft pinned layers"] == division.draft.resident_bytes
    assert table["draft ring"] == division.draft.ring_bytes
    with pytest.raises(BudgetExceeded):
        one.divide(least - 32 * MIB, 8)


def test_a_draft_that_fits_is_held_in_memory_before_any_layer_of_the_target_is_pinned():
    target, draft = PaperModel("t", 40, 40 * MIB), PaperModel("d", 8, 40 * MIB)
    one = divider(target, draft)
    ring = 2 * 80 * MIB  # what the draft takes of the smallest budget
    division = one.divide(smallest(one) + 8 * 80 * MIB - ring, 8)
    assert division.draft.n_streamed_layers == 0
    assert division.target.n_streamed_layers == 40


def test_a_draft_that_does_not_fit_streams_in_part():
    target, draft = PaperModel("t", 40, 40 * MIB), PaperModel("d", 8, 40 * MIB)
    one = divider(target, draft)
    division = one.divide(smallest(one) + 200 * MIB, 8)
    assert division.draft.n_streamed_layers > 0
    assert division.draft.resident_bytes > 0
    assert division.draft.streamed_bytes < 8 * 80 * MIB


def test_a_refusal_says_what_a_shorter_context_and_a_smaller_cache_would_save():
    one = divider(PaperModel("t", 4, MIB))
    with pytest.raises(BudgetExceeded) as failure:
        one.divide(200 * MIB, 8)
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
    assert divider(target, load_mode="ram").divide(8 * GIB, 8).target.n_slots == 0


def test_rejection_sets_memory_aside_for_the_rows_its_chain_was_drawn_from() -> None:
    """Whole rows of float64: at a large vocabulary more than the draft's KV cache."""
    models = PaperModel("target", 6, 8 * MIB), PaperModel("draft", 3, 2 * MIB)
    division = divider(*models, acceptance="rejection", draft_depth=256).divide(2 * GIB, 200)
    assert dict(division.budget.table())["draft probabilities"] == 200 * 32000 * 8
