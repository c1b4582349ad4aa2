"""Products with stored matrices: to the bit those with the decoded weights, summed in one order."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from packed_tensors import packed, weights_of
from quantised_models import awq, compressed, compressed_fp8, fp8, gptq, mxfp4, nvfp4

from backends.packed.codec import CODECS, check_packed
from backends.packed.decoder import Decoder, PackedModule, decode_buffer_bytes
from backends.packed.tensor import TORCH_TYPES, PackedTensor
from backends.packed.twelve_bits import Planes, TwelveBits
from backends.tiles import calls, products
from offload.formats.tensors import CheckpointError, TensorRecord

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {kind: name for name, kind in TORCH_TYPES.items()}
KINDS: dict[str, tuple[str, Callable[[torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]]]
KINDS = {
    "fp8": ("FP8_BLOCKS", fp8()),
    "fp8 with bf16 scales": ("FP8_BLOCKS", fp8(BF16)),
    "fp8 by channel": ("FP8_COMPRESSED", compressed_fp8("channel")),
    "fp8 by tensor": ("FP8_COMPRESSED", compressed_fp8("tensor")),
    "fp8 by block": ("FP8_COMPRESSED", compressed_fp8("block")),
    "int4": ("INT4_PACK_QUANTIZED", compressed(is_symmetric=True)),
    "int4 with zeros": ("INT4_PACK_QUANTIZED", compressed(is_symmetric=False)),
    "int4 in groups of 8": ("INT4_PACK_QUANTIZED", compressed(is_symmetric=False, group=8)),
    "int4 in groups of 1": ("INT4_PACK_QUANTIZED", compressed(is_symmetric=False, group=1)),
    "int4 of whole rows": ("INT4_PACK_QUANTIZED", compressed(is_symmetric=True, group=-1)),
    "gptq": ("INT4_GPTQ", gptq(is_reordered=False)),
    "gptq in another order": ("INT4_GPTQ_REORDERED", gptq(is_reordered=True)),
    "awq": ("INT4_AWQ", awq),
    "nvfp4": ("NVFP4", nvfp4),
    "mxfp4": ("MXFP4", mxfp4),
}
SHAPES = [(72, 64), (136, 2176)]
"""A part of a tile; several tiles, whose columns are decoded in several steps."""


def stored_matrix(
    kind: str, shape: tuple[int, int], dtype: torch.dtype
) -> tuple[PackedTensor, list[torch.Tensor], torch.Tensor]:
    """Return (tensor, stored parts, decoded weights)."""
    scheme, quantise = KINDS[kind]
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])) / 8
    parts, decoded = quantise(weights)
    codec = CODECS[scheme]
    names = (*codec.suffixes, *codec.optional)  # type: ignore[attr-defined]
    some = [parts[name].contiguous() for name in names if name in parts]
    records = tuple(
        TensorRecord(name, NAMES[part.dtype], tuple(part.shape), Path("m"), 0, part.nbytes)
        for name, part in zip(names, some, strict=False)
    )
    record = TensorRecord("up", NAMES[dtype], shape, Path("m"), 0, 0, scheme)
    tensor = PackedTensor(record, records)
    check_packed(tensor)
    return tensor, [part.view(torch.uint8).flatten() for part in some], decoded.to(dtype)


def in_order(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return x [n, n_in] times weights [n_out, n_in], added as backends/tiles/products.py says."""
    n_missing = -x.shape[1] % 32
    both = x[:, None], weights[None]
    left, right = (torch.nn.functional.pad(item.float(), (0, n_missing)) for item in both)
    n_in = left.shape[2]
    if x.dtype == BF16:
        starts = [i for j in range(0, n_in, 32) for i in (j + 1, j)]
        columns = [slice(i, i + 31, 2) for i in starts]
    else:
        columns = [slice(j, j + 16) for j in range(0, n_in, 16)]
    total = torch.zeros(len(x), len(weights), 16)
    for own in columns:
        total = total + left[..., own] * right[..., own]
    for n in (8, 4, 2, 1):
        total = total[..., :n] + total[..., n : 2 * n]
    return total[..., 0]


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_decoded_weights_to_the_bit(
    kind: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    tensor, stored, decoded = stored_matrix(kind, shape, dtype)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, shape[1], generator=generator).to(dtype)
    bias = torch.randn(shape[0], generator=generator).to(dtype)
    decoder = Decoder([PackedModule((tensor,))], 2)
    try:
        (whole,) = decoder.decode([tensor], [stored])
        assert torch.equal(whole, decoded)
        actual = decoder.multiply(tensor, stored, x, bias)
        plain = torch.nn.functional.linear(x.double(), decoded.double(), bias.double())
        torch.testing.assert_close(actual.double(), plain, rtol=0.01, atol=0.02)
        if dtype != F32:  # products of float32 are rounded, or not if they are fused with the sum
            expected = (in_order(x, decoded) + bias).to(dtype)
            assert torch.equal(actual, expected)
    finally:
        decoder.close()


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("kind", ["fp8", "int4 with zeros", "gptq", "awq", "mxfp4"])
def test_a_row_has_the_same_bits_beside_any_rows(kind: str, dtype: torch.dtype) -> None:
    """With any number of rows and threads."""
    tensor, stored, _ = stored_matrix(kind, (520, 2176), dtype)
    x = torch.randn(133, 2176, generator=torch.Generator().manual_seed(2)).to(dtype)
    decoders = [Decoder([PackedModule((tensor,), is_multiplied=True)], n) for n in (1, 3)]
    n_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        expected = decoders[0].multiply(tensor, stored, x, None)
        for decoder in decoders:
            for n in (1, 7, 8, 33, 129):
                for start in (0, 133 - n):
                    rows = x[start : start + n]
                    actual = decoder.multiply(tensor, stored, rows, None)
                    assert torch.equal(actual, expected[start : start + n])
            shaped = decoder.multiply(tensor, stored, x[None, :6], None)
            assert torch.equal(shaped[0], expected[:6])
            assert not len(decoder.multiply(tensor, stored, x[:0], None))
    finally:
        torch.set_num_threads(n_threads)
        for decoder in decoders:
            decoder.close()


def twelve_bits(shape: tuple[int, int]) -> tuple[PackedTensor, list[torch.Tensor], torch.Tensor]:
    n = math.prod(shape)
    weights = weights_of(1, n, list(range(112, 125)) * 20 + [0, 90, 140])
    stored = packed(TwelveBits(), weights, 111)
    record = TensorRecord("up", "BF16", shape, Path("m"), 0, len(stored), "BF16_12")
    decoded = torch.from_numpy(weights.view(np.int16)).view(BF16).view(shape)
    return PackedTensor(record), [torch.from_numpy(stored)], decoded


@pytest.mark.parametrize("shape", [(8, 1), (7, 40), (300, 36), (72, 1024), (40, 2500), (9, 4097)])
def test_twelve_bits_with_any_shape(shape: tuple[int, int]) -> None:
    """Rows may begin within a block, with exceptions everywhere."""
    tensor, stored, decoded = twelve_bits(shape)
    assert Planes(tensor.n_weights).n_exceptions(len(stored[0])) > 0 or shape[1] < 9
    x = torch.randn(6, shape[1], generator=torch.Generator().manual_seed(3)).to(BF16)
    decoder = Decoder([PackedModule((tensor,))], 2)
    try:
        (whole,) = decoder.decode([tensor], [stored])
        assert torch.equal(whole.view(torch.int16), decoded.view(torch.int16))
        for n in (1, 6):
            actual = decoder.multiply(tensor, stored, x[:n], None)
            assert torch.equal(actual, in_order(x[:n], decoded).to(BF16))
    finally:
        decoder.close()


def test_an_exception_with_a_code_is_refused() -> None:
    tensor, (stored,), _ = twelve_bits((64, 2048))
    planes = Planes(tensor.n_weights)
    position = int(stored[planes.exceptions :][1:4].int() @ torch.tensor([1, 256, 65536]).int())
    half, place = divmod(position % 1024, 512)
    stored[planes.codes + position // 1024 * 512 + place] |= 3 << 4 * half
    decoder = Decoder([PackedModule((tensor,))], 1)
    try:
        for call in (
            lambda: decoder.decode([tensor], [[stored]]),
            lambda: decoder.multiply(tensor, [stored], torch.ones(1, 2048, dtype=BF16), None),
        ):
            with pytest.raises(CheckpointError, match="'up' is no BF16_12.*has a code, too"):
                call()
    finally:
        decoder.close()


def test_every_code_of_float8() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float().to(BF16)
    parts = (
        TensorRecord("weight", "F8_E4M3", (2, 128), Path("m"), 0, 256),
        TensorRecord("weight_scale_inv", "F32", (1, 1), Path("m"), 0, 4),
    )
    record = TensorRecord("up", "BF16", (2, 128), Path("m"), 0, 260, "FP8_BLOCKS")
    tensor = PackedTensor(record, parts)
    decoder = Decoder([PackedModule((tensor,))], 1)
    try:
        stored = [codes, torch.ones(1).view(torch.uint8)]
        (actual,) = decoder.decode([tensor], [stored])
        assert actual.isnan().sum() == 2
        is_number = ~expected.isnan()
        flat = actual.flatten()
        assert torch.equal(flat[is_number], expected[is_number])
        assert torch.equal(flat.signbit()[is_number], expected.signbit()[is_number])
    finally:
        decoder.close()


def test_a_scale_of_zero_for_the_whole_matrix_is_no_crash() -> None:
    tensor, stored, _ = stored_matrix("nvfp4", (64, 64), BF16)
    stored[2] = torch.zeros(1).view(torch.uint8)
    decoder = Decoder([PackedModule((tensor,), is_multiplied=True)], 1)
    try:
        x = torch.ones(1, 64, dtype=BF16)
        assert not decoder.multiply(tensor, stored, x, None).isfinite().any()
    finally:
        decoder.close()


def test_memory_is_that_of_the_plan() -> None:
    """No matrix is whole in memory: the workspaces are all, and they hold the largest tile."""
    tensor, _, _ = twelve_bits((64, 2048))
    module = PackedModule((tensor,), is_multiplied=True)
    beside = TwelveBits().scratch_bytes(tensor)
    for n_threads in (1, 3):
        decoder = Decoder([module], n_threads)
        try:
            assert decoder.n_bytes + beside == decode_buffer_bytes([module], n_threads)
            assert decoder.n_bytes >= n_threads * calls.WORKSPACE_BYTES
        finally:
            decoder.close()
    assert decode_buffer_bytes([], 4) == 0
    whole = PackedModule((tensor,))
    grown = decode_buffer_bytes([whole], 1) - decode_buffer_bytes([module], 1)
    assert grown >= tensor.decoded_bytes


@pytest.mark.parametrize("n_in", [32, 2048, 11008, 16416, 40000])
@pytest.mark.parametrize("size", [2, 4])
def test_a_tile_fits_its_memory(n_in: int, size: int) -> None:
    for is_by_columns in (False, True):
        num_rows, n_columns, stride = products.tile_shape(n_in, size, is_by_columns)
        assert num_rows % 8 == 0
        assert 8 <= num_rows <= products.MAX_TILE_ROWS
        assert n_columns % 32 == 0
        assert num_rows * stride * size <= products.TILE_BYTES
        assert n_columns < stride
