"""Attention in segments against plain softmax over all keys, kernel by kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import CPU, random_tree, reference, states
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_memory import peak_bytes

from backends.attention import segments
from backends.attention.batch import BatchLayout
from backends.attention.layout import CausalLayout, PassLayout
from backends.attention.masks import Segment, SegmentedMask, SegmentedRows, segmented_mask
from backends.attention.segments import (
    attend_segments,
    blockwise_kernel,
    choose_kernel,
    cuda_efficient_kernel,
    cuda_flash_kernel,
    merge,
)


def attend(
    layout: PassLayout,
    start: int,
    end: int,
    window: int | None,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    **shapes: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (segmented, reference) attention for the new rows start..end of a layout."""
    scale, n_keys = 0.4, layout.prefix + layout.first_new + end
    query, key, value = states(end - start, n_keys, **shapes)
    mask = segmented_mask(BatchLayout.of(layout), start, end, window, query.dtype, query.device)
    actual = attend_segments(query, key, value, mask, scale, softcap, sinks)
    allowed = layout.allowed(start, end, window)
    moved = [x.cpu() for x in (query, key, value)]
    return actual.cpu(), reference(*moved, allowed, scale, softcap, sinks)


def rows_first(*arguments: Any) -> segments.Partial:
    """The plain kernel with outputs in the memory layout of CUDA's efficient kernel."""
    output, lse = blockwise_kernel(*arguments)
    return output.transpose(1, 2).contiguous().transpose(1, 2), lse


@pytest.fixture(params=["blockwise", "rows first"], scope="module")
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """The plain kernel with blocks of 16 keys."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "MAX_SCORE_BYTES", 1)
        if request.param == "rows first":
            patch.setattr(segments, "blockwise_kernel", rows_first)
        yield


@settings(max_examples=60, deadline=None)
@given(
    prefix=st.integers(0, 40),
    n_live=st.integers(0, 12),
    n_new=st.integers(1, 24),
    window=st.none() | st.integers(1, 30),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1), (6, 2)]),
    dims=st.sampled_from([(8, 8), (12, 8), (8, 20), (5, 5)]),
    softcap=st.none() | st.just(1.5),
    has_sinks=st.booleans(),
    data=st.data(),
)
def test_a_tree_sees_what_it_may(
    kernels: None, prefix, n_live, n_new, window, heads, dims, softcap, has_sinks, data
) -> None:
    layout = random_tree(prefix, n_live, n_new, np.random.default_rng(n_new * 100 + prefix))
    start = data.draw(st.integers(0, n_new - 1))
    end = data.draw(st.integers(start + 1, n_new))
    options = {"heads": heads, "dims": dims, "softcap": softcap}
    if has_sinks:
        options["sinks"] = torch.linspace(-2.0, 5.0, heads[0])
    actual, expected = attend(layout, start, end, window, **options)
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= 1e-5


@settings(max_examples=40, deadline=None)
@given(
    prefix=st.integers(0, 40),
    n_new=st.integers(1, 40),
    window=st.none() | st.integers(1, 30),
    data=st.data(),
)
def test_a_prompt_sees_what_came_before(kernels: None, prefix, n_new, window, data) -> None:
    start = data.draw(st.integers(0, n_new - 1))
    end = data.draw(st.integers(start + 1, n_new))
    actual, expected = attend(CausalLayout(prefix, n_new), start, end, window)
    assert (actual - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(kernels: None, dtype: torch.dtype) -> None:
    layout = random_tree(300, 5, 40, np.random.default_rng(0))
    actual, expected = attend(layout, 0, 40, 290, dtype=dtype, dims=(64, 64))
    assert actual.dtype == dtype
    assert (actual - expected).abs().max() <= 0.05  # scores of up to 10, rounded to 8 bits


def test_a_row_that_sees_nothing_of_a_segment(kernels: None) -> None:
    """Two chained nodes and a window of one: each node sees only itself."""
    layout = PassLayout(3, np.array([3, 4, 5]), np.tril(np.ones((3, 3), dtype=bool)))
    actual, expected = attend(layout, 0, 3, 1)
    assert torch.isfinite(actual).all()
    assert (actual - expected).abs().max() <= 1e-5


def test_large_scores_do_not_overflow() -> None:
    """The value e^lse is beyond float32 in both parts."""
    item, two = torch.ones(1, 1, 1, 4), torch.full((1, 1, 1, 4), 3.0)
    lse = torch.full((1, 1, 1), 500.0)
    output, total = merge((item, lse), (two, lse))
    assert output.tolist() == [[[[2.0] * 4]]]
    assert total.item() == pytest.approx(500.0 + np.log(2.0))


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_memory_does_not_grow_with_nodes_times_context_times_heads(
    softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four times the context takes no more memory besides the keys and values."""
    monkeypatch.setattr(segments, "MAX_SCORE_BYTES", 1 << 18)
    peaks = [_peak_bytes(n_keys, softcap) for n_keys in (1000, 4000)]
    num_tokens, n_heads = 64, 8
    assert peaks[1] < num_tokens * n_heads * 4000 * 4 / 4  # a quarter of one copy of the scores
    assert peaks[1] <= 1.05 * peaks[0]


def _peak_bytes(prefix: int, softcap: float | None) -> int:
    layout = random_tree(prefix, 0, 64, np.random.default_rng(1))
    query, key, value = states(64, prefix + 64, heads=(8, 2), dims=(32, 32))
    mask = segmented_mask(BatchLayout.of(layout), 0, 64, None, torch.float32, CPU)
    return peak_bytes(lambda: attend_segments(query, key, value, mask, 0.2, softcap))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("window", [None, 290])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 64), (12, 12)])
def test_kernels_of_cuda(dtype: torch.dtype, window: int | None, dims: tuple[int, int]) -> None:
    """Tree and prompt against float64: fp32 to 1e-5, half precision to its rounding."""
    device = torch.device("cuda")
    layouts = (random_tree(300, 5, 70, np.random.default_rng(0)), CausalLayout(300, 70))
    for layout in layouts:
        for rows in ((0, 70), (3, 4), (0, 33)):
            actual, expected = attend(layout, *rows, window, dtype=dtype, dims=dims, device=device)
            tolerance = 1e-5 if dtype == torch.float32 else 0.02
            assert (actual - expected).abs().max() <= tolerance


@pytest.mark.parametrize("kernel", [cuda_flash_kernel, cuda_efficient_kernel])
def test_calls_of_the_cuda_kernels_fit_their_signatures(kernel: segments.Kernel) -> None:
    """PyTorch's own shape functions, on meta tensors, take the arguments and return the shapes."""
    device = torch.device("meta")
    query, keys, values = (
        torch.empty(shape, dtype=torch.bfloat16, device=device)
        for shape in ((2, 3, 5, 64), (2, 1, 40, 64), (2, 1, 40, 64))
    )
    mask = torch.empty(1, 1, 5, 48, dtype=torch.bfloat16, device=device)[..., :40]
    for segment in (Segment(0, 40), Segment(0, 40, mask), Segment(0, 40, None, is_causal=True)):
        output, lse = kernel(query, keys, values, segment, 0.125)
        assert (output.shape, output.dtype) == ((2, 3, 5, 64), torch.bfloat16)
        assert (lse.shape, lse.dtype) == ((2, 3, 5), torch.float32)


@pytest.mark.parametrize("kernel", [cuda_flash_kernel, cuda_efficient_kernel])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_outputs_are_put_together_as_a_gpu_lays_them_out(
    kernel: segments.Kernel, window: int | None, heads: tuple[int, int], monkeypatch
) -> None:
    """Strides of meta tensors equal those on a GPU."""
    monkeypatch.setattr(segments, "choose_kernel", lambda *_: kernel)
    rng, meta = np.random.default_rng(0), torch.device("meta")
    layouts = random_tree(30, 5, 7, rng), random_tree(0, 0, 7, rng), CausalLayout(0, 7)
    masks = [
        segmented_mask(BatchLayout.of(layout), 0, 7, window, torch.bfloat16, meta)
        for layout in layouts
    ]
    whole = torch.empty(1, 1, 7, 48, dtype=torch.bfloat16, device=meta)
    for mask in [*masks, SegmentedMask((SegmentedRows(0, 7, (Segment(0, 48, whole),)),), 48)]:
        shape = {"heads": heads, "dims": (64, 64), "dtype": torch.bfloat16, "device": meta}
        query, key, value = states(7, mask.n_keys, **shape)
        output = attend_segments(query, key, value, mask, 0.125)
        assert output.shape == (1, 7, 4, 64)
        assert output.is_contiguous()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_which_kernel_of_cuda() -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("older than Ampere")
    half = torch.zeros(1, device="cuda", dtype=torch.bfloat16)
    assert choose_kernel(half, None, 128) is cuda_flash_kernel
    assert choose_kernel(half.float(), None, 128) is cuda_efficient_kernel
    assert choose_kernel(half, None, 512) is blockwise_kernel
