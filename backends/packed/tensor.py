"""Packed tensors: tensors that must be decoded before they are computed with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from offload.formats.safetensors import DTYPE_BITS
from offload.formats.tensors import TensorRecord

Run: TypeAlias = Callable[[Sequence[Callable[[], None]]], None]
"""Function that runs tasks in threads and returns when all of them are done."""

DecodeRows: TypeAlias = Callable[[int, int, torch.Tensor, Run], None]
"""(start, end, out, run): fills `out` with rows start..end of a tensor; `start` is a multiple of
ROW_STEP. Raises ValueError with a reason for bytes that are no such tensor."""
ROW_STEP = 128
"""Rows of an fp8 block, and enough rows for whole blocks of twelve bits."""

TORCH_TYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
    "U8": torch.uint8,
}


@dataclass(frozen=True)
class PackedTensor:
    """record: dtype and shape of the decoded tensor, and the packing scheme."""

    record: TensorRecord
    stored: tuple[TensorRecord, ...] = ()
    """Stored parts of the tensor; empty: `record` itself is stored."""
    is_transposed: bool = False
    """Whether the last two dimensions of `record`, as the model has them, are swapped in the
    stored parts, as in the experts of gpt-oss."""

    @property
    def parts(self) -> tuple[TensorRecord, ...]:
        return self.stored or (self.record,)

    @property
    def n_weights(self) -> int:
        return math.prod(self.record.shape)

    @property
    def row_weights(self) -> int:
        """Number of weights in one row (index of the first dimension)."""
        return self.n_weights // self.record.shape[0] if self.n_weights else 0

    @property
    def decoded_bytes(self) -> int:
        return self.n_weights * DTYPE_BITS[self.record.dtype] // 8


def typed(tensor: PackedTensor, raw: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parts as tensors of their dtype and shape, over the same memory."""
    return [
        part.view(TORCH_TYPES[record.dtype]).view(record.shape)
        for part, record in zip(raw, tensor.parts, strict=True)
    ]


def form(tensor: PackedTensor) -> tuple[str, int]:
    """Return (dtype of the decoded weights, weights of a row)."""
    return tensor.record.dtype, tensor.row_weights


def shown(value: Any) -> str:
    """Return a value of a config.json, shortened for an error message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:56] + " ..."


def check_parts(
    tensor: PackedTensor, expected: Sequence[tuple[tuple[str, ...], list[int]]]
) -> None:
    """Raise ValueError with a reason for parts of another dtype or shape, or with a misaligned
    offset."""
    for part, (dtypes, shape) in zip(tensor.parts, expected, strict=True):
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
