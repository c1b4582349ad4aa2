"""Attention in segments against plain softmax over all keys, kernel by kernel."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from checkpoints import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_memory import peak_bytes
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from backends.contract.backend import BackendError
from backends.hf import attention
from backends.hf.attention import (
    SEGMENTED,
    _looks_into_mask,
    blockwise_kernel,
    choose_kernel,
    cuda_efficient_kernel,
    cuda_flash_kernel,
    merge,
    segmented_attention,
    supports_segments,
)
from backends.hf.layout import CausalLayout, PassLayout
from backends.hf.masks import Segment, SegmentedMask, segmented_mask

CPU = torch.device("cpu")
WHOLE_MASKS = {"bloom", "gpt2", "xglm"}  # ALiBi; a mask added by hand; attention of its own
_cpu_kernel = attention.cpu_kernel


class Module(torch.nn.Module):
    """Stands for the attention module that calls."""


def random_tree(prefix: int, n_live: int, n_new: int, rng: np.random.Generator) -> PassLayout:
    """`n_new` rows behind `n_live` older nodes, each below the prefix or any node before it."""
    visible = np.eye(n_live + n_new, dtype=bool)
    depths = np.zeros(n_live + n_new, dtype=np.int64)
    for node in range(n_live + n_new):
        parent = int(rng.integers(-1, node)) if node else -1
        if parent >= 0:
            visible[node] |= visible[parent]
            depths[node] = depths[parent] + 1
    return PassLayout(prefix, prefix + depths, visible[n_live:])


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: np.ndarray,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Softmax over all keys in float64, [1, rows, heads, value dim]."""
    group = query.shape[1] // key.shape[1]
    q, k, v = (x.double() for x in (query, key, value))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~torch.from_numpy(allowed), -torch.inf)
    return (scores.softmax(dim=-1) @ v).transpose(1, 2)


def states(
    n_rows: int,
    n_keys: int,
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (8, 8),
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values, laid out as a projection and a cache with room to spare have them.

    heads: of queries, of keys. dims: of keys, of values.
    """
    generator = torch.Generator().manual_seed(n_rows * 1000 + n_keys)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    query = normal(1, n_rows, heads[0], dims[0]).transpose(1, 2)
    key, value = (normal(1, heads[1], n_keys + 7, dim)[:, :, :n_keys] for dim in dims)
    return query, key, value


def attend(
    layout: PassLayout, start: int, end: int, window: int | None, **options: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """(in segments, reference) for the new rows start..end of a layout."""
    softcap, scale = options.pop("softcap", None), 0.4
    n_keys = layout.prefix + layout.first_new + end
    query, key, value = states(end - start, n_keys, **options)  # type: ignore[arg-type]
    mask = segmented_mask(layout, start, end, window, query.dtype, query.device)
    found, _ = segmented_attention(Module(), query, key, value, mask, scale, softcap)  # type: ignore[arg-type]
    moved = [x.cpu() for x in (query, key, value)]
    return found.cpu(), reference(*moved, layout.allowed(start, end, window), scale, softcap)  # type: ignore[arg-type]


def rows_first(*arguments: Any) -> attention.Partial:
    """The kernel for the CPU, whose outputs lie in memory as those of the efficient one of CUDA."""
    output, lse = _cpu_kernel(*arguments)
    return output.transpose(1, 2).contiguous().transpose(1, 2), lse


@pytest.fixture(params=["fused", "rows first", "blockwise"], scope="module")
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """The kernel chosen for the CPU, and the plain one with blocks of 16 keys, which fits all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MAX_SCORE_BYTES", 1)
        if request.param == "blockwise":
            patch.setattr(attention, "cpu_kernel", blockwise_kernel)
        if request.param == "rows first":
            patch.setattr(attention, "cpu_kernel", rows_first)
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
    data=st.data(),
)
def test_a_tree_sees_what_it_may(
    kernels: None, prefix, n_live, n_new, window, heads, dims, softcap, data
) -> None:
    layout = random_tree(prefix, n_live, n_new, np.random.default_rng(n_new * 100 + prefix))
    start = data.draw(st.integers(0, n_new - 1))
    end = data.draw(st.integers(start + 1, n_new))
    found, expected = attend(layout, start, end, window, heads=heads, dims=dims, softcap=softcap)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-5


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
    found, expected = attend(CausalLayout(prefix, n_new), start, end, window)
    assert (found - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(kernels: None, dtype: torch.dtype) -> None:
    layout = random_tree(300, 5, 40, np.random.default_rng(0))
    found, expected = attend(layout, 0, 40, 290, dtype=dtype, dims=(64, 64))
    assert found.dtype == dtype
    assert (found - expected).abs().max() <= 0.05  # scores of up to 10, rounded to 8 bits


def test_a_row_that_sees_nothing_of_a_segment(kernels: None) -> None:
    """Two nodes one after another, and a window of one: each sees itself alone."""
    layout = PassLayout(3, np.array([3, 4, 5]), np.tril(np.ones((3, 3), dtype=bool)))
    found, expected = attend(layout, 0, 3, 1)
    assert torch.isfinite(found).all()
    assert (found - expected).abs().max() <= 1e-5


def test_large_scores_do_not_overflow() -> None:
    """e^lse is beyond float32 in both parts."""
    one, two = torch.ones(1, 1, 1, 4), torch.full((1, 1, 1, 4), 3.0)
    lse = torch.full((1, 1, 1), 500.0)
    output, total = merge((one, lse), (two, lse))
    assert output.tolist() == [[[[2.0] * 4]]]
    assert total.item() == pytest.approx(500.0 + np.log(2.0))


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_memory_does_not_grow_with_nodes_times_context_times_heads(
    softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four times the context takes no more memory beside the keys and values."""
    monkeypatch.setattr(attention, "MAX_SCORE_BYTES", 1 << 18)
    peaks = [_peak_bytes(n_keys, softcap) for n_keys in (1000, 4000)]
    n_rows, n_heads = 64, 8
    assert peaks[1] < n_rows * n_heads * 4000 * 4 / 4  # a quarter of one copy of the scores
    assert peaks[1] <= 1.05 * peaks[0]


def _peak_bytes(prefix: int, softcap: float | None) -> int:
    layout = random_tree(prefix, 0, 64, np.random.default_rng(1))
    query, key, value = states(64, prefix + 64, heads=(8, 2), dims=(32, 32))
    mask = segmented_mask(layout, 0, 64, None, torch.float32, CPU)
    return peak_bytes(lambda: segmented_attention(Module(), query, key, value, mask, 0.2, softcap))


def _mask_of(n_keys: int) -> SegmentedMask:
    return SegmentedMask((Segment(0, n_keys),), n_keys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mask": None}, "Module was given no segments: its mask is NoneType"),
        ({"attention_mask": _mask_of(9)}, r"its mask is for 1 sequence of 9"),
        ({"s_aux": torch.zeros(4)}, "Module has s_aux"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(change: dict[str, object], message: str) -> None:
    query, key, value = states(2, 10)
    arguments: dict[str, object] = {"attention_mask": _mask_of(10), **change}
    with pytest.raises(BackendError, match=message):
        segmented_attention(Module(), query, key, value, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_which_families_compute_in_segments(family: str) -> None:
    name, values = FAMILIES[family]
    config = getattr(transformers, name)(**values)
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    assert supports_segments(architecture, config) == (family not in WHOLE_MASKS)


def test_a_family_that_computes_with_the_mask_gets_a_whole_one() -> None:
    config = transformers.DogeConfig()
    assert not supports_segments(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


@pytest.mark.parametrize(
    ("code", "is_read"),
    [
        ("attend(q, k, attention_mask, mask=attention_mask)", False),
        ("attention_mask is not None", False),
        ("scores + attention_mask", True),
        ("attention_mask[:, :, :, :5]", True),
        ("attention_mask.dtype == bool", True),
    ],
)
def test_what_counts_as_looking_into_the_mask(code: str, is_read: bool) -> None:
    assert any(_looks_into_mask(node) for node in ast.walk(ast.parse(code))) == is_read


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("window", [None, 290])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 64), (12, 12)])
def test_kernels_of_cuda(dtype: torch.dtype, window: int | None, dims: tuple[int, int]) -> None:
    """Tree and prompt, against float64: fp32 to 1e-5, half precision to its rounding."""
    device = torch.device("cuda")
    layouts = (random_tree(300, 5, 70, np.random.default_rng(0)), CausalLayout(300, 70))
    for layout in layouts:
        for rows in ((0, 70), (3, 4), (0, 33)):
            found, expected = attend(layout, *rows, window, dtype=dtype, dims=dims, device=device)
            tolerance = 1e-5 if dtype == torch.float32 else 0.02
            assert (found - expected).abs().max() <= tolerance


@pytest.mark.parametrize("kernel", [cuda_flash_kernel, cuda_efficient_kernel])
def test_calls_of_the_cuda_kernels_fit_their_signatures(kernel: attention.Kernel) -> None:
    """On meta tensors: PyTorch's own shape functions take the arguments, and give the shapes."""
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
    kernel: attention.Kernel, window: int | None, heads: tuple[int, int], monkeypatch
) -> None:
    """Strides of meta tensors are those of a GPU's."""
    monkeypatch.setattr(attention, "choose_kernel", lambda *_: kernel)
    rng, meta = np.random.default_rng(0), torch.device("meta")
    layouts = random_tree(30, 5, 7, rng), random_tree(0, 0, 7, rng), CausalLayout(0, 7)
    masks = [segmented_mask(one, 0, 7, window, torch.bfloat16, meta) for one in layouts]
    whole = torch.empty(1, 1, 7, 48, dtype=torch.bfloat16, device=meta)
    for mask in [*masks, SegmentedMask((Segment(0, 48, whole),), 48)]:
        shape = {"heads": heads, "dims": (64, 64), "dtype": torch.bfloat16, "device": meta}
        query, key, value = states(7, mask.n_keys, **shape)
        output, _ = segmented_attention(Module(), query, key, value, mask)
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


def test_the_name_is_known_to_transformers() -> None:
    assert transformers.AttentionInterface()[SEGMENTED] is segmented_attention
