"""Numbers of four bits whose groups share a scale: what the formats of them have in common.

Nothing here is a device's: the same code decodes on a CPU and on a GPU, with the same bits.
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
"""That are decoded at a time: in float32 they stay in the processor's cache."""
_SCRATCH_BYTES = 16
"""For each weight of a piece, at most, while it is decoded."""
_ZERO_BYTES = 4
"""For each group of the matrix that has a zero of its own: all of them are unpacked at once."""
DecodePiece: TypeAlias = Callable[[int, int, torch.Tensor, torch.Tensor], None]
"""(start, end, numbers, room): fills `numbers`, float32 [rows, columns], with the rows start..end.
room: int16, memory for as many columns at least, for any use."""


def check_groups(scales: TensorRecord, dim: int, n_in: int) -> int:
    """The number of groups of a row. Raises ValueError where the row is not made of such."""
    if len(scales.shape) != 2 or not scales.shape[dim] or n_in % scales.shape[dim]:
        raise ValueError(f"scales {list(scales.shape)} do not divide rows of {n_in} weights")
    return scales.shape[dim]


def check_group_sizes(
    sizes: Collection[Any], n_in: int, n_groups: int, is_in_order: bool = True
) -> None:
    """Raise ValueError where rows of `n_in` weights in so many groups are of none of these sizes.

    Args:
        sizes: of a group in weights as settings say: -1 and what is as long as a row are rows, and
            with None any will do. The last group of a row may be shorter.
        is_in_order: which group an input is of is not listed, so all have to be as long.
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
    """rounded: the number format that a weight is rounded to before that of the model."""
    step = _piece_rows(n_columns)

    def decode_rows(start: int, end: int, out: torch.Tensor, run: Run) -> None:
        # For all pieces: memory for each would come from the system anew, page by page.
        shape = (min(step, end - start), n_columns)
        numbers = torch.empty(shape, dtype=torch.float32, device=out.device)
        for first in range(start, end, step):
            last = min(first + step, end)
            some, read_chunk = numbers[: last - first], out[first - start : last - start]
            decode(first, last, some, read_chunk.view(torch.int16))
            read_chunk.copy_(some if rounded in (torch.float32, out.dtype) else some.to(rounded))

    return decode_rows


def scratch_bytes(tensor: PackedTensor, *, has_zeros: bool) -> int:
    """Memory that decoding takes beside: of a piece, and of the zeros of all groups."""
    n_columns = tensor.record.shape[1]
    n_zeros = math.prod(tensor.parts[1].shape) if has_zeros else 0
    return _SCRATCH_BYTES * _piece_rows(n_columns) * n_columns + _ZERO_BYTES * n_zeros


def _piece_rows(n_columns: int) -> int:
    return max(1, _PIECE_WEIGHTS // n_columns // ROW_STEP) * ROW_STEP


def nibbles(words: torch.Tensor, capacity: torch.Tensor | None = None) -> torch.Tensor:
    """uint8 [..., 8] of int32 [...], the lowest four bits first.

    room: int16 [..., 4], where they are made.
    """
    as_bytes = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    pairs = torch.empty_like(as_bytes, dtype=torch.int16) if capacity is None else capacity
    pairs.copy_(as_bytes)
    return pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F).view(torch.uint8)


def scale(numbers: torch.Tensor, zeros: torch.Tensor | int, scales: torch.Tensor) -> None:
    """numbers = (numbers - zeros) * scales.

    In float32, in which torch is quickest, and as if in the numbers of the scales: a whole number
    of five bits times a scale of eleven is exact there, and rounded once, to those.

    Args:
        numbers: float32 [rows, columns], small whole numbers.
        zeros: of each group [rows, groups], or of all.
        scales: [rows, groups]
    """
    grouped = numbers.unflatten(1, (scales.shape[1], -1))
    grouped -= zeros[:, :, None] if isinstance(zeros, torch.Tensor) else zeros
    grouped *= scales.float()[:, :, None]
