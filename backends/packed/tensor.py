"""A tensor that is stored in other bytes than it is computed with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from offload.formats.safetensors import DTYPE_BITS
from offload.formats.tensors import TensorRecord

Run: TypeAlias = Callable[[Sequence[Callable[[], None]]], None]
"""Does pieces of work, in threads; all of them are done when it returns."""

DecodeRows: TypeAlias = Callable[[int, int, torch.Tensor, Run], None]
"""(start, end, out, run): fills `out` with the rows start..end of a tensor, the first of which is a
multiple of ROW_STEP. Raises ValueError, which says why, for bytes that are no such tensor."""
ROW_STEP = 128
"""Rows of a block of fp8, and enough for whole blocks of twelve bits."""

TORCH_TYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
}


@dataclass(frozen=True)
class PackedTensor:
    """record: its dtype and shape are those of what is decoded, its scheme says from what."""

    record: TensorRecord
    stored: tuple[TensorRecord, ...] = ()
    """What files have of it; `record` itself where this is empty."""

    @property
    def parts(self) -> tuple[TensorRecord, ...]:
        return self.stored or (self.record,)

    @property
    def n_weights(self) -> int:
        return math.prod(self.record.shape)

    @property
    def row_weights(self) -> int:
        """Of one row, of as many as the shape has first."""
        return self.n_weights // self.record.shape[0] if self.n_weights else 0

    @property
    def decoded_bytes(self) -> int:
        return self.n_weights * DTYPE_BITS[self.record.dtype] // 8


def typed(tensor: PackedTensor, raw: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts as tensors of their numbers, over the same memory."""
    return [
        part.view(TORCH_TYPES[record.dtype]).view(record.shape)
        for part, record in zip(raw, tensor.parts, strict=True)
    ]


def shown(value: Any) -> str:
    """A value of somebody's config.json, as part of one line."""
    text = repr(value)
    return text if len(text) <= 60 else text[:56] + " ..."


def check_parts(
    tensor: PackedTensor, requested: Sequence[tuple[tuple[str, ...], list[int]]]
) -> None:
    """Raise ValueError, which says why, for parts that are not of one of these dtypes, of this
    shape, and where such numbers can lie."""
    for part, (dtypes, shape) in zip(tensor.parts, requested, strict=True):
        if part.dtype not in dtypes or list(part.shape) != shape:
            name = part.name.rpartition(".")[2]
            raise ValueError(
                f"its {name} is {part.dtype}{list(part.shape)}, not {' or '.join(dtypes)}{shape}"
            )
        itemsize = DTYPE_BITS[part.dtype] // 8
        if part.offset % itemsize:
            raise ValueError(
                f"{part.name} lies at offset {part.offset} of its file, not a multiple of "
                f"{itemsize}: save it again with safetensors"
            )
