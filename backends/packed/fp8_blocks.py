"""float8 quantisation with a scale for each block of 128 x 128 (the layout of DeepSeek-V3), each
row, or a matrix (compressed-tensors).

W[r, c] = weight[r, c] * weight_scale_inv[r / 128, c / 128], in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from backends.packed.compressed_int4 import check_compressed
from backends.packed.groups import by_pieces, scratch_bytes
from backends.packed.tensor import DecodeRows, PackedTensor, check_parts, form, shown, typed
from backends.tiles.stored import Table, make_table, scale_kind
from offload.formats.tensors import TensorRecord

_BLOCK = 128
_LARGEST = 448.0  # maximum of float8_e4m3fn


class Fp8Blocks:
    """Block-wise fp8; see Quantisation."""

    name = "FP8_BLOCKS"
    method = "fp8"
    remedy = "download it again"
    separator, whole, n_dims = ".", ".weight", 2
    suffixes: tuple[str, ...] = ("weight", "weight_scale_inv")
    optional: tuple[str, ...] = ()

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        block = settings.get("weight_block_size")
        if block != [_BLOCK, _BLOCK]:
            raise ValueError(f"scales of blocks {shown(block)}, not [{_BLOCK}, {_BLOCK}]")

    def is_main(self, record: TensorRecord) -> bool:
        return record.dtype.startswith("F8_")

    def shape(self, stored: Sequence[TensorRecord]) -> tuple[int, ...]:
        return stored[0].shape

    def example(self, shape: tuple[int, int]) -> list[tuple[str, tuple[int, ...]]]:
        n_out, n_in = shape
        return [("F8_E4M3", shape), ("F32", (-(-n_out // _BLOCK), -(-n_in // _BLOCK)))]

    def check(self, tensor: PackedTensor) -> None:
        n_out, n_in = tensor.record.shape
        blocks = [-(-n_out // _BLOCK), -(-n_in // _BLOCK)]
        check_parts(tensor, [(("F8_E4M3",), [n_out, n_in]), (("F32", "BF16"), blocks)])

    def check_described(self, tensor: PackedTensor, settings: Mapping[str, Any]) -> None:
        """Do nothing: the settings have only the block size, which `check_settings` checks."""

    def scratch_bytes(self, tensor: PackedTensor) -> int:
        return scratch_bytes(tensor, has_zeros=False)

    def table(self, tensor: PackedTensor, stored: Sequence[torch.Tensor], written: int) -> Table:
        return float8_table(tensor, stored, written, (_BLOCK, _BLOCK))

    def open(self, tensor: PackedTensor, stored: Sequence[torch.Tensor]) -> DecodeRows:
        weight, scales = typed(tensor, stored)
        n_in = weight.shape[1]
        codes = weight.view(torch.int8)

        def decode(start: int, end: int, numbers: torch.Tensor, scratch: torch.Tensor) -> None:
            _widen(codes[start:end], numbers, scratch[:, :n_in])
            own = scales[start // _BLOCK : -(-end // _BLOCK)].float()
            for first, row in zip(range(0, end - start, _BLOCK), own, strict=True):
                numbers[first : first + _BLOCK] *= row.repeat_interleave(_BLOCK)[:n_in]

        return by_pieces(n_in, decode)


class CompressedFp8(Fp8Blocks):
    """compressed-tensors' float8: a scale for each row, each block of 128 x 128, or the whole
    matrix. W = weight * weight_scale, in the number format of the scale."""

    name = "FP8_COMPRESSED"
    method = "compressed-tensors"
    file_format = "float-quantized"
    suffixes: tuple[str, ...] = ("weight", "weight_scale")

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        values = {
            "num_bits": (8,),
            "type": ("float",),
            "strategy": ("channel", "tensor", "block"),
            "block_structure": (None, [_BLOCK, _BLOCK]),
        }
        check_compressed(settings, values, has_plain_inputs=False)

    def example(self, shape: tuple[int, int]) -> list[tuple[str, tuple[int, ...]]]:
        return [("F8_E4M3", shape), ("BF16", (shape[0], 1))]

    def check(self, tensor: PackedTensor) -> None:
        scales = list(tensor.parts[1].shape)
        if list(_block_of(tensor)) == [_BLOCK, _BLOCK]:
            n_out, n_in = tensor.record.shape
            scales = [-(-n_out // _BLOCK), -(-n_in // _BLOCK)]
        weight = list(tensor.record.shape)
        check_parts(tensor, [(("F8_E4M3",), weight), (("F32", "BF16", "F16"), scales)])

    def table(self, tensor: PackedTensor, stored: Sequence[torch.Tensor], written: int) -> Table:
        rounded = tensor.parts[1].dtype
        return float8_table(tensor, stored, written, _block_of(tensor), rounded)

    def open(self, tensor: PackedTensor, stored: Sequence[torch.Tensor]) -> DecodeRows:
        weight, scales = typed(tensor, stored)
        n_in, block = weight.shape[1], _block_of(tensor)
        codes = weight.view(torch.int8)
        whole = scales.float().view(-1, -(-n_in // block[1]))

        def decode(start: int, end: int, numbers: torch.Tensor, scratch: torch.Tensor) -> None:
            _widen(codes[start:end], numbers, scratch[:, :n_in])
            rows = torch.arange(start, end, device=codes.device) // block[0]
            numbers *= whole[rows].repeat_interleave(block[1], dim=1)[:, :n_in]

        return by_pieces(n_in, decode, scales.dtype)


def _block_of(tensor: PackedTensor) -> tuple[int, int]:
    """Return the [rows, columns] that share a scale, by the shape of the scales."""
    n_out, n_in = tensor.record.shape
    shape = tensor.parts[1].shape
    if math.prod(shape) == 1:
        return n_out, n_in
    return (1, n_in) if tuple(shape) in ((n_out, 1), (n_out,)) else (_BLOCK, _BLOCK)


def float8_table(
    tensor: PackedTensor,
    stored: Sequence[torch.Tensor],
    written: int,
    block: tuple[int, int],
    rounded: str | None = None,
) -> Table:
    """Return the table of float8 weights whose blocks [rows, columns] have a scale each."""
    from backends.tiles import float8

    values = {
        float8.CODES: stored[0].data_ptr(),
        float8.SCALES: stored[1].data_ptr(),
        float8.SCALE_KIND: scale_kind(tensor.parts[1].dtype),
        float8.BLOCK_ROWS: block[0],
        float8.BLOCK_COLUMNS: block[1],
    }
    return make_table(float8.decode_float8, *form(tensor), written, values, rounded=rounded)


def _widen(codes: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
    """Convert float8_e4m3fn to float32, ten times as fast as torch.

    Shifted left by seven bits, exponent and fraction are those of a float16 that is 2**8 times
    smaller, also for subnormal numbers; except the two codes of NaN, which become 480.
    """
    scratch.copy_(codes).bitwise_left_shift_(7).bitwise_and_(~0x4000)  # a copy of the sign
    out.copy_(scratch.view(torch.float16)).mul_(256)
    low, high = torch.aminmax(out)
    if max(-float(low), float(high)) > _LARGEST:
        out[out.abs() > _LARGEST] = torch.nan
