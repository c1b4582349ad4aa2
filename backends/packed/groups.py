"""Common code of 4-bit formats whose groups of weights share a scale.

The same code decodes on a CPU and on a GPU, with the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import torch

from backends.packed.tensor import ROW_STEP, DecodeRows, PackedTensor, Run, shown
from offload.formats.tensors import TensorRecord

N_IN_WORD = 8
SCALES = ("F16", "BF16", "F32")
_PIECE_WEIGHTS = 1 << 19
"""Weights that are decoded at a time: in float32 they stay in the processor's cache."""
_SCRATCH_BYTES = 16
"""Maximum temporary bytes per weight of a piece while it is decoded."""
_ZERO_BYTES = 4
"""Bytes per group that has a zero point of its own: all of them are unpacked at once."""
DecodePiece: TypeAlias = Callable[[int, int, torch.Tensor, torch.Tensor], None]
"""(start, end, numbers, scratch): fills `numbers`, float32 [rows, columns], with rows start..end.
scratch: int16 [rows, at least as many columns], temporary memory."""


def check_groups(scales: TensorRecord, dim: int, n_in: int) -> int:
    """Return the number of groups of a row. Raises ValueError if they do not divide the row."""
    if len(scales.shape) != 2 or not scales.shape[dim] or n_in % scales.shape[dim]:
        raise ValueError(f"scales {list(scales.shape)} do not divide rows of {n_in} weights")
    return scales.shape[dim]


def check_group_sizes(
    sizes: Collection[Any], n_in: int, n_groups: int, is_in_order: bool = True
) -> None:
    """Raise ValueError if `n_groups` groups of rows of `n_in` weights have none of these sizes.

    Args:
        sizes: group sizes in weights from the settings: -1 is a whole row, None any size. The last
            group of a row may be shorter.
        is_in_order: groups are consecutive inputs without a g_idx, so all must have equal size.
    """
    if any(size is None or _are_groups(size, n_in, n_groups, is_in_order) for size in sizes):
        return
    names = " or ".join(map(shown, sizes))
    raise ValueError(f"rows of {n_in} weights have {n_groups} groups, and group_size is {names}")


def _are_groups(size: Any, n_in: int, n_groups: int, is_in_order: bool) -> bool:
    if size == -1:
        return n_groups == 1
    if type(size) is not int or size < 1 or -(-n_in // size) != n_groups:
        return False
    return n_groups == 1 or n_in % size == 0 or not is_in_order


def by_pieces(
    n_columns: int, decode: DecodePiece, rounded: torch.dtype = torch.float32
) -> DecodeRows:
    """Make a row decoder of a piece decoder; rounded: dtype that weights are rounded to first."""
    step = _piece_rows(n_columns)

    def decode_rows(start: int, end: int, out: torch.Tensor, run: Run) -> None:
        # One buffer for all pieces: new memory for each would be faulted in page by page.
        shape = (min(step, end - start), n_columns)
        numbers = torch.empty(shape, dtype=torch.float32, device=out.device)
        for first in range(start, end, step):
            last = min(first + step, end)
            piece, target = numbers[: last - first], out[first - start : last - start]
            decode(first, last, piece, target.view(torch.int16))
            target.copy_(piece if rounded in (torch.float32, out.dtype) else piece.to(rounded))

    return decode_rows


def scratch_bytes(tensor: PackedTensor, *, has_zeros: bool) -> int:
    """Return the temporary memory of decoding: for a piece, and the zeros of all groups."""
    n_columns = tensor.record.shape[1]
    n_zeros = math.prod(tensor.parts[1].shape) if has_zeros else 0
    return _SCRATCH_BYTES * _piece_rows(n_columns) * n_columns + _ZERO_BYTES * n_zeros


def _piece_rows(n_columns: int) -> int:
    return max(1, _PIECE_WEIGHTS // n_columns // ROW_STEP) * ROW_STEP


def nibbles(words: torch.Tensor, scratch: torch.Tensor | None = None) -> torch.Tensor:
    """Unpack int32 [...] to uint8 [..., 8], the lowest four bits first.

    scratch: int16 [..., 4], memory for the result.
    """
    as_bytes = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    pairs = torch.empty_like(as_bytes, dtype=torch.int16) if scratch is None else scratch
    pairs.copy_(as_bytes)
    return pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F).view(torch.uint8)


def scale(numbers: torch.Tensor, zeros: torch.Tensor | int, scales: torch.Tensor) -> None:
    """Compute numbers = (numbers - zeros) * scales in place.

    In float32, which is fastest in torch, with the result of the scales' dtype: a whole number of
    five bits times a scale of eleven bits is exact, and rounded only once afterwards.

    Args:
        numbers: float32 [rows, columns], small whole numbers.
        zeros: zero points [rows, groups], or one for all groups.
        scales: [rows, groups]
    """
    grouped = numbers.unflatten(1, (scales.shape[1], -1))
    grouped -= zeros[:, :, None] if isinstance(zeros, torch.Tensor) else zeros
    grouped *= scales.float()[:, :, None]
