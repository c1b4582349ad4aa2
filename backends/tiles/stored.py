"""Stored matrices as compiled decoders take them (backends/tiles/tables.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from backends.tiles import tables

_ROUNDED = {"F32": tables.FULL, "F16": tables.AS_HALF, "BF16": tables.AS_BF16}
_SCALES = {
    "F32": tables.SCALE_FLOAT32,
    "F16": tables.SCALE_HALF,
    "BF16": tables.SCALE_BF16,
    "U8": tables.SCALE_E8M0,
    "F8_E4M3": tables.SCALE_E4M3,
}
MULTIPLIED = {
    torch.bfloat16: tables.BF16,
    torch.float16: tables.HALF_AS_FLOAT32,
    torch.float32: tables.FLOAT32,
}
"""Values of tables.WRITTEN for a matrix to be multiplied with rows of a dtype."""
WRITTEN = {"BF16": tables.BF16, "F16": tables.HALF, "F32": tables.FLOAT32}
"""Values of tables.WRITTEN for a tensor that is decoded to a dtype."""


@dataclass(frozen=True)
class Table:
    """decoder: address of a compiled decoder. values: its table. retained: memory that this
    refers to, beside the stored parts."""

    decoder: int
    values: np.ndarray
    retained: Sequence[Any] = ()

    @property
    def address(self) -> int:
        return int(self.values.ctypes.data)

    @property
    def has_error(self) -> bool:
        return bool(self.values[tables.ERROR])


def make_table(
    decoder: Any,
    dtype: str,
    n_in: int,
    written: int,
    values: Mapping[int, int],
    *,
    rounded: str | None = None,
    by_columns: bool = False,
    retained: Sequence[Any] = (),
) -> Table:
    """Return the table of a matrix.

    Args:
        decoder: compiled callback.
        dtype: of the decoded weights. n_in: columns of the matrix.
        values: the format's own values, by their places.
        written: a value of tables.WRITTEN.
        rounded: number format that weights are rounded to first; None: `dtype` alone.
        by_columns: neighbours in memory are of one column.
    """
    array = np.zeros(tables.N_VALUES, np.int64)
    is_narrower = written in (tables.FLOAT32, tables.HALF_AS_FLOAT32) and dtype == "BF16"
    is_last = rounded in (None, dtype, "F32")
    if not is_last or is_narrower or (written == tables.FLOAT32 and dtype == "F16"):
        array[tables.ROUNDED] = _ROUNDED[dtype if is_last or rounded is None else rounded]
    array[tables.WRITTEN] = written
    array[tables.N_IN] = n_in
    array[tables.BY_COLUMNS] = by_columns
    for place, value in values.items():
        array[place] = value
    return Table(decoder.address, array, retained)


def scale_kind(dtype: str) -> int:
    """Return the number format of scales that a file stores as this dtype."""
    return _SCALES[dtype]
