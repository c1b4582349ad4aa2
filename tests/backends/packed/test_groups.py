"""Quantised numbers: every code, against torch's arithmetic in the format of the scales."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backends.packed.codec import CODECS
from backends.packed.fp8_blocks import _widen
from backends.packed.groups import by_pieces, nibbles, scale
from backends.packed.tensor import PackedTensor, check_parts
from offload.formats.tensors import TensorRecord


def test_every_code_of_float8() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    expected = codes.view(torch.float8_e4m3fn).float()
    assert expected.isnan().sum() == 2
    actual = torch.empty(2, 128)
    for some in (codes, codes.masked_fill((codes & 127) == 127, 0)):
        _widen(some.view(torch.int8), actual, torch.empty(2, 130, dtype=torch.int16)[:, :128])
        requested = some.view(torch.float8_e4m3fn).float()
        torch.testing.assert_close(actual, requested, rtol=0, atol=0, equal_nan=True)
        is_number = ~requested.isnan()
        assert torch.equal(
            actual.signbit()[is_number], requested.signbit()[is_number]
        )  # including zero


def test_numbers_lie_at_multiples_of_their_size() -> None:
    part = TensorRecord("up.qweight", "I32", (8, 8), Path("m"), 1002, 256)
    tensor = PackedTensor(part, (part,))
    match = "offset 1002 of its file, not a multiple of 4: save it again with safetensors"
    with pytest.raises(ValueError, match=match):
        check_parts(tensor, [(("I32",), [8, 8])])


def test_nibbles_come_from_the_lowest_on() -> None:
    words = torch.tensor([[0x76543210, -1], [0, -0x12345679]], dtype=torch.int32)
    actual = nibbles(words)
    assert actual.dtype == torch.uint8
    assert actual[0].tolist() == [list(range(8)), [15] * 8]
    assert actual[1].tolist() == [[0] * 8, [7, 8, 9, 10, 11, 12, 13, 14]]
    assert torch.equal(nibbles(words, torch.zeros(2, 2, 8, dtype=torch.int16)[..., :4]), actual)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_scaled_as_if_in_the_numbers_of_the_scales(dtype: torch.dtype, has_zeros: bool) -> None:
    """All values, with scales that are subnormal, huge, negative, infinite or NaN."""
    torch.manual_seed(0)
    values = torch.arange(16).repeat(64, 8)  # [rows, 8 groups of 16]
    scales = torch.randn(64, 8).mul(10.0 ** torch.randint(-9, 5, (64, 8))).to(dtype)
    scales[0, :4] = torch.tensor([torch.inf, torch.nan, 0.0, -0.0], dtype=dtype)
    zeros = torch.randint(0, 16, (64, 8), dtype=torch.uint8) if has_zeros else 8
    shown = zeros.to(dtype)[:, :, None] if isinstance(zeros, torch.Tensor) else zeros
    expected = ((values.unflatten(1, (8, 16)).to(dtype) - shown) * scales[:, :, None]).flatten(1)
    numbers = values.float()
    scale(numbers, zeros, scales)
    torch.testing.assert_close(numbers.to(dtype), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_weight_is_rounded_to_the_scales_format_and_then_to_the_models(
    out_dtype: torch.dtype,
) -> None:
    whole = torch.randn(300, 40)

    def decode(start: int, end: int, numbers: torch.Tensor, scratch: torch.Tensor) -> None:
        assert scratch.dtype == torch.int16
        assert scratch.shape[1] >= 40
        scratch.fill_(-1)
        numbers.copy_(whole[start:end])

    out = torch.zeros(172, 40, dtype=out_dtype)
    by_pieces(40, decode, torch.float16)(128, 300, out, lambda work: None)
    assert torch.equal(out, whole[128:].half().to(out_dtype))


@pytest.mark.parametrize("scheme", ["INT4_GPTQ", "INT4_AWQ", "INT4_PACK_QUANTIZED"])
def test_zeros_of_small_groups_are_counted(scheme: str) -> None:
    """Zero points are unpacked for the whole matrix, first in int16 and with copies."""
    codec, counted = CODECS[scheme], []
    n_out, n_in = 4096, 4096
    for size in (128, 8):
        shapes = {
            "INT4_GPTQ": [(n_in // 8, n_out), (n_in // size, n_out), (n_in // size, n_out // 8)],
            "INT4_AWQ": [(n_in, n_out // 8), (n_in // size, n_out), (n_in // size, n_out // 8)],
            "INT4_PACK_QUANTIZED": [
                (n_out, n_in // 8),
                (n_out, n_in // size),
                (n_out // 8, n_in // size),
            ],
        }[scheme]
        dtypes = ("I32", "BF16", "I32")
        parts = tuple(
            TensorRecord("", dtype, shape, Path("m"), 0, 0)
            for dtype, shape in zip(dtypes, shapes, strict=True)
        )
        record = TensorRecord("", "BF16", (n_out, n_in), Path("m"), 0, 0, scheme)
        tensor = PackedTensor(record, parts)
        codec.check(tensor)
        counted.append(codec.scratch_bytes(tensor))
    assert counted[1] - counted[0] == 4 * n_out * (n_in // 8 - n_in // 128)
