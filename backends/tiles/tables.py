"""How a decoder is called, and how it writes weights.

A decoder is a compiled function (table, row, num_rows, column, n_columns, out, stride, scratch). It
decodes a part of a matrix. `table` is the address of int64 values that describe the matrix: these
four, and those of its format. Weight (row + r, column + c) becomes entry r * stride + c of `out`.
A decoder is called for MAX_COLUMNS columns and MAX_TILE_ROWS rows at most. `scratch` has
SCRATCH_BYTES bytes.
"""

from __future__ import annotations

ROUNDED, WRITTEN, ERROR, N_IN, BY_COLUMNS, FIRST = range(6)
"""Places in a table: how weights are rounded first, what is written, whether an error was noticed
(1), columns of the matrix, whether neighbours in memory are of one column (1) and not of one row,
and the first place of the format's own values."""
N_VALUES = FIRST + 10
"""Values of a table; a format leaves those that it does not need 0."""
FULL, AS_HALF, AS_BF16 = range(3)
"""Values of ROUNDED."""
BF16, HALF, FLOAT32, HALF_AS_FLOAT32 = range(4)
"""Values of WRITTEN. The last rounds to float16 and writes float32."""
ITEM_BYTES = {BF16: 2, HALF: 2, FLOAT32: 4, HALF_AS_FLOAT32: 4}
SCALE_FLOAT32, SCALE_HALF, SCALE_BF16, SCALE_E8M0, SCALE_E4M3 = range(5)
"""Number formats of scales."""
MAX_COLUMNS, MAX_TILE_ROWS = 2048, 64
SCRATCH_BYTES = 4 * (2 * MAX_COLUMNS) + MAX_TILE_ROWS * (MAX_COLUMNS // 2 + 64)
"""Memory of a decoder: a scale and a zero for each column, and the codes of four bits of a tile."""
