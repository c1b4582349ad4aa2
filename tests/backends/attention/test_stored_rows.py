"""Number formats of rows in the KV cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backends.attention.stored_rows import (
    MODEL_DTYPE,
    ROW_FORMATS,
    KvFormats,
    StoredRows,
    kv_formats,
)
from backends.contract.backend import UnsupportedModel

DIMS = (8, 32, 80, 128)


def states_of(dim: int, dtype: torch.dtype = torch.float32, n: int = 300) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dim)
    scales = torch.logspace(-4, 3, n)[:, None]
    return (torch.randn(1, 2, n, dim, generator=generator) * scales).to(dtype)


def decoded(name: str, states: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    row_format = ROW_FORMATS[name]
    return StoredRows(row_format.encode(states), row_format, states.shape[-1]).decoded(dtype)


def test_q8_0_has_the_numbers_of_ggml() -> None:
    """But for numbers between two others, of which ggml takes the even one in its fast kernels and
    the larger one in plain C, which gguf has."""
    quants = pytest.importorskip("gguf.quants")
    from gguf import GGMLQuantizationType

    states = states_of(128)
    stored = quants.quantize(states.numpy(), GGMLQuantizationType.Q8_0)
    expected = quants.dequantize(stored, GGMLQuantizationType.Q8_0)
    blocks = states.unflatten(-1, (-1, 32))
    ratios = blocks * (1 / (blocks.abs().amax(-1, keepdim=True) / 127))
    is_between = ((ratios - ratios.floor()) == 0.5).flatten(-2).numpy()
    assert 0 < is_between.sum() < 10
    assert np.array_equal(decoded("q8_0", states).numpy()[~is_between], expected[~is_between])


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(
    ("name", "error"), [("q8_0", 0.57 / 127), ("fp8", 2**-4), ("bf16", 2**-8), ("f16", 2**-11)]
)
def test_a_number_is_near_what_was_stored(name: str, error: float, dim: int) -> None:
    """q8_0: relative to the largest number of the block, half of a step, and the rounding of the
    scale; else to the number."""
    states = states_of(dim, n=50)[:, :, 10:40]  # all formats hold these
    magnitudes = states.abs()
    if name == "q8_0":
        blocks = [x.amax(-1, keepdim=True).expand(x.shape) for x in magnitudes.split(32, -1)]
        magnitudes = torch.cat(blocks, -1)
    difference = (decoded(name, states) - states).abs()
    smallest = {"fp8": 2**-10, "q8_0": 127 * 2**-25}.get(name, 2**-25)  # below normal numbers
    assert bool((difference <= error * magnitudes + smallest).all())
    assert bool((difference > 0).any())


@pytest.mark.parametrize("name", ROW_FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", DIMS)
def test_a_row_has_the_same_bytes_wherever_it_is(name: str, dtype: torch.dtype, dim: int) -> None:
    row_format, states = ROW_FORMATS[name], states_of(dim, dtype)
    whole = row_format.encode(states)
    assert whole.shape[-1] * whole.itemsize == row_format.row_bytes(dim, dtype)
    for n in (1, 3, 7, 64):
        parts = [row_format.encode(x) for x in states.split(n, 2)]
        assert torch.equal(torch.cat(parts, 2), whole)
    of_head = row_format.encode(states[:, 1:].clone())
    assert torch.equal(of_head, whole[:, 1:])


@pytest.mark.parametrize("name", ROW_FORMATS)
@pytest.mark.parametrize("dim", [0, *DIMS])
def test_every_way_to_read_a_row_gives_the_same_numbers(name: str, dim: int) -> None:
    row_format, states = ROW_FORMATS[name], states_of(dim, torch.bfloat16, n=5000)
    rows = StoredRows(row_format.encode(states), row_format, dim)
    assert rows.shape == states.shape
    whole = rows.decoded(torch.float32)
    columns = torch.empty(1, 33, dim)
    rows.heads(slice(1, 2)).read(slice(4900, 4933), columns)
    assert torch.equal(columns, whole[0, 1:, 4900:4933])
    picked = torch.tensor([4932, 0, 7])
    rows.heads(slice(0, 1)).pick(picked, columns[:, :3])
    assert torch.equal(columns[:, :3], whole[0, :1, picked])


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_large_numbers_stay_finite_and_zeros_stay_zero(name: str) -> None:
    states = torch.zeros(1, 1, 2, 64)
    states[0, 0, 1, :2] = torch.tensor([3e38, -3e38])
    values = decoded(name, states)
    assert bool(values.isfinite().all())
    assert not values[0, 0, 0].any()
    assert values[0, 0, 1, 0] > 400
    assert values[0, 0, 1, 1] < -400


def test_names() -> None:
    assert kv_formats(None, None) == KvFormats(MODEL_DTYPE, MODEL_DTYPE)
    assert kv_formats("q8_0", None) == KvFormats(ROW_FORMATS["q8_0"], MODEL_DTYPE)
    with pytest.raises(UnsupportedModel, match="cannot be q4_0: f16, bf16, fp8, q8_0 can"):
        kv_formats(None, "q4_0")
