"""The roofline: known counts, exact properties, and the bottleneck."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.shapes.shape import (
    FFN,
    HEAD,
    OUTPUT,
    QKV,
    AttentionShape,
    LayerShape,
    Matrix,
    ModelShape,
)
from specdec.analysis.experts import by_memory
from specdec.analysis.operators import ATTENTION, matrix_work, pass_work, total
from specdec.analysis.roofline import (
    COMPUTE,
    FREE_SLACK,
    MEMORY,
    PCIE,
    STORAGE,
    TIERS,
    free_tokens,
    pass_bound,
    place,
)
from specdec.devices.spec import DeviceSpec

HIDDEN, HEADS, FEED_FORWARD, LAYERS, VOCAB = 4096, 32, 11008, 32, 32000
MI = 2**20


def dense(role: str, n_in: int, n_out: int, number_format: str = "F16") -> Matrix:
    return Matrix(role, n_in, n_out, 2 * n_in * n_out, number_format)


def decoder(
    hidden: int = HIDDEN, heads: int = HEADS, ffn: int = FEED_FORWARD, n_layers: int = LAYERS
) -> ModelShape:
    """Llama-2-7B with two feed-forward matrices, as in the published counts."""
    matrices = (
        *(dense(QKV, hidden, hidden) for _ in range(3)),
        dense(OUTPUT, hidden, hidden),
        dense(FFN, hidden, ffn),
        dense(FFN, ffn, hidden),
    )
    size = hidden // heads
    layer = LayerShape(
        matrices,
        AttentionShape(heads, heads, size, size, 2 * 2 * hidden, "F16"),
        sum(matrice.n_bytes for matrice in matrices),
    )
    head = dense(HEAD, hidden, VOCAB)
    return ModelShape(
        Path("model"), "llama", hidden, VOCAB, MI, (layer,) * n_layers, head, 2 * head.n_bytes, 2
    )


SMALL = decoder(hidden=64, heads=4, ffn=128, n_layers=3)
DEVICE = DeviceSpec("d", 1e9, 2e10, {"F16": 5e11}, 8 * 10**9)


# --- known values ---------------------------------------------------------------------------------


def test_known_intensities() -> None:
    at_8 = pass_work(decoder(), 8, 512, 8)
    assert at_8[QKV].intensity == pytest.approx(15.93774, abs=5e-6)
    assert at_8[OUTPUT].intensity == pytest.approx(15.93774, abs=5e-6)
    assert at_8[ATTENTION].intensity == pytest.approx(14.84058, abs=5e-6)
    at_512 = pass_work(decoder(), 512, 512, 512)
    assert at_512[FFN].intensity == pytest.approx(874.0844, abs=5e-5)


def test_known_totals_of_the_layers() -> None:
    def layers(context: int) -> dict[str, float]:
        work = pass_work(decoder(), 1, context, 1)
        everything = total(item for name, item in work.items() if name != HEAD)
        return {"flops": everything.flops / MI, "stored": everything.stored_elements / MI}

    assert layers(4096)["flops"] == 11648
    assert layers(32768)["stored"] == 12992


def test_counts_of_products() -> None:
    work = pass_work(decoder(), 8, 512, 8)
    counts = {name: item.n_products for name, item in work.items()}
    assert counts == {
        QKV: 3 * LAYERS,
        ATTENTION: 2 * HEADS * LAYERS,
        OUTPUT: LAYERS,
        FFN: 2 * LAYERS,
        HEAD: 1,
    }


# --- properties of the counts ---------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 64), st.one_of(st.none(), st.integers(1, 40)))
def test_windows_count_what_the_mask_shows(
    num_tokens: int, context: int, window: int | None
) -> None:
    num_tokens = min(num_tokens, context)
    attention = AttentionShape(4, 4, 8, 8, 0, "F16", window=window)
    reach = window or context
    seen = [
        {key for key in range(context) if row - reach < key <= row}
        for row in range(context - num_tokens, context)
    ]
    assert attention.n_keys(num_tokens, context) == len(set.union(*seen))
    assert attention.n_keys_of_a_row(context) == max(map(len, seen))


@given(st.integers(1, 64), st.integers(64, 256))
def test_sharing_keys_saves_their_traffic_and_no_flops(num_tokens: int, context: int) -> None:
    layer = SMALL.layers[0]
    assert layer.attention is not None
    grouped = replace(layer.attention, n_kv_heads=1, kv_bytes_per_token=64)
    shared = replace(SMALL, layers=(replace(layer, attention=grouped),) * 3)
    item, other = (pass_work(m, num_tokens, context, 1)[ATTENTION] for m in (SMALL, shared))
    assert item.flops == other.flops
    assert item.stored_elements == 4 * other.stored_elements
    assert item.elements - item.stored_elements == other.elements - other.stored_elements
    assert item.stored_bytes == 4 * other.stored_bytes


def of_experts(matrix: Matrix) -> Matrix:
    return replace(matrix, n_bytes=8 * matrix.n_bytes, n_matrices=8, n_active=2)


def test_experts_compute_for_the_active_and_those_that_are_hit_are_read() -> None:
    dense_matrix = Matrix(FFN, 64, 128, 2 * 64 * 128, "F16")
    experts = of_experts(dense_matrix)
    for num_tokens, n_hit in ((1, 2.0), (2, 2 * 2**0.7), (500, 8.0)):
        item, mixture = (matrix_work(matrix, num_tokens, 2) for matrix in (dense_matrix, experts))
        assert mixture.flops == 2 * item.flops
        assert mixture.stored_elements == pytest.approx(n_hit * item.stored_elements, abs=1)
        assert mixture.stored_bytes == mixture.expert_bytes
        assert mixture.stored_bytes == pytest.approx(n_hit * item.stored_bytes, abs=1)
        assert mixture.elements - mixture.stored_elements == 2 * (
            item.elements - item.stored_elements
        )
        assert item.expert_bytes == 0


def test_bytes_are_elements_in_their_real_size() -> None:
    everything = total(pass_work(SMALL, 7, 100, 7).values())
    assert everything.n_bytes == 2 * everything.elements  # all in F16 here
    packed = [replace(m, n_bytes=m.n_weights * 18 // 32) for m in SMALL.layers[0].matrices]
    work = pass_work(replace(SMALL, layers=(LayerShape(tuple(packed), None, 0),)), 1, 100, 1)
    assert ATTENTION not in work
    assert work[FFN].stored_bytes == work[FFN].stored_elements * 18 // 32


def test_flops_by_format_sum_to_all() -> None:
    layer = SMALL.layers[0]
    mixed = replace(layer, matrices=(dense(FFN, 64, 128, "Q6_K"), dense(FFN, 128, 64, "Q4_K")))
    work = pass_work(replace(SMALL, layers=(layer, mixed)), 3, 10, 3)
    assert set(work[FFN].flops_by_format) == {"F16", "Q6_K", "Q4_K"}
    assert all(sum(item.flops_by_format.values()) == item.flops for item in work.values())


def a_mixture() -> ModelShape:
    """Three layers whose feed-forward matrices have eight experts, two of them used."""
    layer = SMALL.layers[0]
    matrices = tuple(of_experts(m) if m.role == FFN else m for m in layer.matrices)
    n_bytes = (
        layer.n_bytes + sum(m.n_bytes for m in matrices) - sum(m.n_bytes for m in layer.matrices)
    )
    return replace(SMALL, layers=(LayerShape(matrices, layer.attention, n_bytes),) * 3)


def test_experts_have_what_the_rest_of_a_mixture_leaves() -> None:
    model = a_mixture()
    rest = model.weight_bytes - model.expert_bytes + 10 * model.kv_bytes_per_token
    half = place(model, 10, with_memory(rest + model.expert_bytes // 2))
    assert half.experts is not None
    assert (half.streamed_bytes, half.storage_share) == (0, 0.0)
    assert half.experts.stored_bytes == model.expert_bytes // 2
    assert half.experts.hit_rate == pytest.approx(1 - math.exp(-2.75))
    missed = model.expert_bytes / 4 * math.exp(-2.75)
    assert half.experts.bytes_per_token == pytest.approx(missed)
    bound = pass_bound(model, with_memory(0), half, 1, 10, 1)
    storage = DEVICE.storage_bytes_per_second
    assert bound.tier_seconds(STORAGE) == pytest.approx(missed / storage, rel=0.01)
    none = place(model, 10, with_memory(rest - 1000))
    assert none.experts is not None
    assert (none.streamed_bytes, none.experts.stored_bytes) == (1000, 0)
    assert none.experts.bytes_per_token == model.expert_bytes / 4
    whole = place(model, 10, with_memory(rest + model.expert_bytes))
    assert whole.experts is not None
    assert (whole.experts.hit_rate, whole.experts.bytes_per_token) == (1.0, 0)
    rates = [item.hit_rate for item in by_memory(model, 10)]
    assert rates == sorted(rates)
    assert len(set(rates)) == len(rates) > 3


def test_experts_have_whole_slots_beside_what_the_process_takes() -> None:
    model = a_mixture()
    item = model.largest_expert_bytes
    assert (model.n_experts_in_all, model.expert_bytes) == (24, 24 * item)
    rest = model.weight_bytes - model.expert_bytes + 10 * model.kv_bytes_per_token
    device = with_memory(int(rest + 12 * item))
    for process_bytes in (0, 5 * int(item)):
        actual = place(replace(model, process_bytes=process_bytes), 10, device)
        assert actual.experts is not None
        assert actual.experts.stored_bytes == 12 * item - process_bytes
    first, *remaining = model.layers
    doubled = tuple(replace(m, n_bytes=2 * m.n_bytes) if m.is_routed else m for m in first.matrices)
    larger = replace(first, matrices=doubled, n_bytes=first.n_bytes + int(8 * item))
    actual = place(replace(model, layers=(larger, *remaining)), 10, device)
    assert actual.experts is not None
    assert actual.experts.hit_rate == pytest.approx(1 - math.exp(-5.5 * 6 / 24))


# --- location of the bytes ------------------------------------------------------------------------


def with_memory(n_bytes: int) -> DeviceSpec:
    return replace(DEVICE, memory_bytes=n_bytes)


def test_what_does_not_fit_is_streamed() -> None:
    context = 100
    staying = SMALL.non_layer_bytes + context * SMALL.kv_bytes_per_token
    assert SMALL.kv_bytes_per_token == 3 * 2 * 2 * 64
    whole = place(SMALL, context, with_memory(staying + SMALL.layer_bytes))
    assert (whole.streamed_bytes, whole.missing_bytes) == (0, 0)
    part = place(SMALL, context, with_memory(staying + SMALL.layer_bytes - 1000))
    assert (part.streamed_bytes, part.missing_bytes) == (1000, 0)
    none = place(SMALL, context, with_memory(staying - 10))
    assert (none.streamed_bytes, none.missing_bytes) == (SMALL.layer_bytes, 10)
    assert none.storage_share == 1.0


def test_a_gpu_is_filled_first_then_the_host() -> None:
    staying = SMALL.non_layer_bytes + 100 * SMALL.kv_bytes_per_token
    device = replace(
        DEVICE,
        vram_bytes=staying + 50_000,
        pcie_bytes_per_second=1e10,
        memory_bytes=40_000,
    )
    placement = place(SMALL, 100, device)
    assert placement.linked_bytes == SMALL.layer_bytes - 50_000
    assert placement.streamed_bytes == SMALL.layer_bytes - 90_000


# --- bottleneck -----------------------------------------------------------------------------------


def bound(device: DeviceSpec, n_tokens: int = 1, context: int = 64) -> str:
    placement = place(SMALL, context, device)
    return pass_bound(SMALL, device, placement, n_tokens, context, n_tokens).bound_by


def test_each_tier_can_bind() -> None:
    small = replace(with_memory(SMALL.non_layer_bytes), storage_bytes_per_second=1e8)
    assert bound(small) == STORAGE
    assert bound(DEVICE) == MEMORY
    assert bound(replace(DEVICE, flops_per_second={"F16": 1e6})) == COMPUTE
    gpu = replace(DEVICE, vram_bytes=10**5, pcie_bytes_per_second=1e8)
    assert bound(gpu) == PCIE
    assert bound(replace(gpu, memory_bytes=1, storage_bytes_per_second=1e6)) == STORAGE


@given(
    storage=st.floats(1e6, 1e11),
    dram=st.floats(1e8, 1e12),
    flops=st.floats(1e8, 1e14),
    memory=st.integers(0, 10**7),
    n_tokens=st.integers(1, 64),
)
def test_a_pass_takes_its_slowest_tier_at_least(
    storage: float, dram: float, flops: float, memory: int, n_tokens: int
) -> None:
    device = DeviceSpec("d", storage, dram, {"F16": flops}, memory)
    placement = place(SMALL, 64, device)
    cost = pass_bound(SMALL, device, placement, n_tokens, 64, n_tokens)
    slowest = max(cost.tier_seconds(tier) for tier in TIERS)
    assert slowest <= cost.seconds * (1 + 1e-9)
    assert cost.seconds <= sum(cost.tier_seconds(tier) for tier in TIERS) * (1 + 1e-9)
    assert cost.bandwidth_seconds <= cost.seconds * (1 + 1e-9)
    assert sum(cost.share(operator) for operator in cost.operators) == pytest.approx(1.0)
    # Streaming takes bytes over bandwidth (SMALL has no vectors).
    assert cost.tier_seconds(STORAGE) == pytest.approx(placement.streamed_bytes / storage)


@given(st.floats(1e6, 1e10), st.floats(1e8, 1e13), st.integers(0, 10**6))
def test_free_tokens_are_the_last_within_the_slack(
    storage: float, flops: float, memory: int
) -> None:
    device = DeviceSpec("d", storage, 1e10, {"F16": flops}, memory)
    placement, context = place(SMALL, 48, device), 48
    seconds = [pass_bound(SMALL, device, placement, n, context, n).seconds for n in range(1, 49)]
    free = [n for n, s in enumerate(seconds, 1) if s <= (1 + FREE_SLACK) * seconds[0]]
    assert free_tokens(SMALL, device, placement, context) == max(free)
    assert free == list(range(1, max(free) + 1))
