"""float8 with a scale for each block of 128 x 128: the layout of DeepSeek-V3.

W[r, c] = weight[r, c] * weight_scale_inv[r / 128, c / 128], in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from backends.packed.groups import by_pieces, scratch_bytes
from backends.packed.tensor import DecodeRows, PackedTensor, check_parts, typed
from offload.formats.tensors import TensorRecord

_BLOCK = 128


class Fp8Blocks:
    """See Quantisation."""

    name = "FP8_BLOCKS"
    method = "fp8"
    remedy = "download it again"
    suffixes: tuple[str, ...] = ("weight", "weight_scale_inv")
    optional: tuple[str, ...] = ()

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        block = settings.get("weight_block_size")
        if block != [_BLOCK, _BLOCK]:
            raise ValueError(f"scales of blocks {block}, not [{_BLOCK}, {_BLOCK}]")

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

    def scratch_bytes(self, tensor: PackedTensor) -> int:
        return scratch_bytes(tensor.record.shape[1])

    def open(self, tensor: PackedTensor, stored: Sequence[torch.Tensor]) -> DecodeRows:
        weight, scales = typed(tensor, stored)
        n_in = weight.shape[1]

        def decode(start: int, end: int) -> torch.Tensor:
            own = scales[start // _BLOCK : -(-end // _BLOCK)].float()
            own = own.repeat_interleave(_BLOCK, 1)[:, :n_in]
            own = own.repeat_interleave(_BLOCK, 0)[: end - start]
            return weight[start:end].float().mul_(own)

        return by_pieces(n_in, decode)
