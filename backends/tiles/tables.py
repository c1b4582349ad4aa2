"""How a decoder is called, and how it writes weights.

A decoder is a compiled function (table, row, n_rows, column, n_columns, out, stride, scratch) that
decodes a part of a matrix. `table` is the address of int64 values that describe the matrix: these
four, and those of its format. Weight (row + r, column + c) becomes entry r * stride + c of `out`.
A decoder is called for MAX_COLUMNS columns and MAX_ROWS rows at most; `scratch` is the address of
SCRATCH_BYTES.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from numba import types

from backends.tiles.compiling import inlined
from backends.tiles.memory import (
    f32_at,
    float_of_bits,
    float_of_half,
    u8_at,
    u16_at,
)

ROUNDED, WRITTEN, ERROR, N_IN, BY_COLUMNS, FIRST = range(6)
"""Places in a table: how weights are rounded first, what is written, whether an error was noticed
(1), columns of the matrix, whether neighbours in memory are of one column (1) and not of one row,
and the first place of the format's own values."""
FULL, AS_HALF, AS_BF16 = range(3)
"""Values of ROUNDED."""
BF16, HALF, FLOAT32, HALF_AS_FLOAT32 = range(4)
"""Values of WRITTEN. The last rounds to float16 and writes float32."""
ITEM_BYTES = {BF16: 2, HALF: 2, FLOAT32: 4, HALF_AS_FLOAT32: 4}
SCALE_FLOAT32, SCALE_HALF, SCALE_BF16, SCALE_E8M0, SCALE_E4M3 = range(5)
"""Number formats of scales."""
MAX_COLUMNS, MAX_ROWS = 2048, 64
SCRATCH_BYTES = 4 * (2 * MAX_COLUMNS) + MAX_ROWS * (MAX_COLUMNS // 2 + 64)
"""Memory of a decoder: a scale and a zero for each column, and the codes of four bits of a tile."""

DECODER = types.void(*[types.int64] * 8)


@inlined
def scale_at(scales, index, kind):
    """Return scale `index` of the memory at `scales`, as float32."""
    if kind == SCALE_FLOAT32:
        return f32_at(scales)[index]
    if kind == SCALE_HALF:
        return float_of_half(u16_at(scales)[index])
    if kind == SCALE_BF16:
        return float_of_bits(types.uint32(u16_at(scales)[index]) << types.uint32(16))
    code = u8_at(scales)[index]
    if kind == SCALE_E4M3:
        return float_of_e4m3(code)
    if code == 0:
        return float_of_bits(types.uint32(1 << 22))  # 2 ** -127, a denormal number
    return float_of_bits(types.uint32(code) << types.uint32(23))


@inlined
def float_of_e4m3(code):
    """Return the float32 of a float8_e4m3fn.

    Shifted left by seven bits, exponent and fraction are those of a float16 that is 2**8 times
    smaller, also for subnormal numbers; except the two codes of NaN.
    """
    sign, magnitude = types.uint32(code & 0x80) << 8, types.uint32(code & 0x7F)
    value = float_of_half(sign | magnitude << 7) * types.float32(256.0)
    return types.float32(float("nan")) if magnitude == 0x7F else value
