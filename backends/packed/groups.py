"""Numbers of four bits whose groups share a scale: what the formats of them have in common.

Nothing here is a device's: the same code decodes on a CPU and on a GPU, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from backends.packed.tensor import ROW_STEP, DecodeRows, Run
from offload.formats.tensors import TensorRecord

N_IN_WORD = 8
SCALES = ("F16", "BF16", "F32")
_PIECE_WEIGHTS = 1 << 20
_SCRATCH_BYTES = 24
"""For each weight of a piece, at most, while it is decoded."""


def check_groups(scales: TensorRecord, dim: int, n_in: int) -> int:
    """The number of groups of a row. Raises ValueError where the row is not made of such."""
    if len(scales.shape) != 2 or not scales.shape[dim] or n_in % scales.shape[dim]:
        raise ValueError(f"scales {list(scales.shape)} do not divide rows of {n_in} weights")
    return scales.shape[dim]


def by_pieces(n_columns: int, decode: Callable[[int, int], torch.Tensor]) -> DecodeRows:
    """decode: the rows start..end, so few that what they take beside is little."""
    step = _piece_rows(n_columns)

    def decode_rows(start: int, end: int, out: torch.Tensor, run: Run) -> None:
        for first in range(start, end, step):
            last = min(first + step, end)
            out[first - start : last - start] = decode(first, last)

    return decode_rows


def scratch_bytes(n_columns: int) -> int:
    return _SCRATCH_BYTES * _piece_rows(n_columns) * n_columns


def _piece_rows(n_columns: int) -> int:
    return max(1, _PIECE_WEIGHTS // n_columns // ROW_STEP) * ROW_STEP


def nibbles(words: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 8] of int32 [...], the lowest four bits first."""
    as_bytes = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    return torch.stack((as_bytes & 15, as_bytes >> 4), dim=-1).flatten(-2)


def scaled(values: torch.Tensor, zeros: torch.Tensor | int, scales: torch.Tensor) -> torch.Tensor:
    """(values - zeros) * scales, in the numbers of the scales.

    Args:
        values: [rows, columns], small whole numbers.
        zeros: of each group [rows, groups], or of all.
        scales: [rows, groups]
    """
    grouped = values.unflatten(1, (scales.shape[1], -1)).to(scales.dtype)
    if isinstance(zeros, torch.Tensor):
        zeros = zeros.to(scales.dtype)[:, :, None]
    return ((grouped - zeros) * scales[:, :, None]).flatten(1)
