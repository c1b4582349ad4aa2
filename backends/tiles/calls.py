"""Calls of the compiled products and decoders with torch's tensors."""

from __future__ import annotations

import torch

from backends.tiles import products, tables
from backends.tiles.products import COLUMN_STEP, MAX_TOKENS, SUM_BYTES, TILE_BYTES, TOKEN_STEP
from backends.tiles.stored import MULTIPLIED, WRITTEN, Table
from backends.tiles.tables import MAX_TILE_ROWS, SCRATCH_BYTES

__all__ = ["MAX_TOKENS", "MULTIPLIED", "WRITTEN", "Table", "decode", "multiply", "padded"]

WORKSPACE_BYTES = TILE_BYTES + MAX_TOKENS * SUM_BYTES + SCRATCH_BYTES


def padded(rows: torch.Tensor) -> torch.Tensor:
    """Return rows [n, n_in] as the products take them: bfloat16 or float32, contiguous, with zeros
    up to whole steps."""
    dtype = torch.bfloat16 if rows.dtype == torch.bfloat16 else torch.float32
    n, n_in = rows.shape
    n_missing = 0 if n == 1 else -n % TOKEN_STEP
    if n_missing or n_in % COLUMN_STEP:
        whole = torch.zeros(n + n_missing, n_in + -n_in % COLUMN_STEP, dtype=dtype)
        whole[:n, :n_in] = rows
        return whole
    return rows.to(dtype).contiguous()


def multiply(
    table: Table,
    written: int,
    n_in: int,
    part: tuple[int, int],
    rows: torch.Tensor,
    out: int,
    n_out: int,
    workspace: int,
) -> None:
    """Compute the outputs `part` (start, end) of rows that `padded` gave.

    out: address of float32 [rows, n_out]. workspace: address of WORKSPACE_BYTES.
    """
    sums = workspace + TILE_BYTES
    scratch = sums + MAX_TOKENS * SUM_BYTES
    matrix = table.decoder, table.address, written, n_in, *part
    products.multiply(*matrix, rows.data_ptr(), len(rows), out, n_out, workspace, sums, scratch)


def decode(
    table: Table, part: tuple[int, int], n_in: int, out: torch.Tensor, workspace: int
) -> None:
    """Decode rows `part` (start, end) into their place in `out` [n_out, ...]."""
    start, end = part
    size = tables.ITEM_BYTES[int(table.values[tables.WRITTEN])]
    step = MAX_TILE_ROWS if table.values[tables.BY_COLUMNS] else 1
    address = out.data_ptr() + start * n_in * size
    scratch = workspace + TILE_BYTES + MAX_TOKENS * SUM_BYTES
    matrix = table.decoder, table.address, start, end - start, 0, n_in
    products.decode(*matrix, step, address, n_in, size, scratch)
