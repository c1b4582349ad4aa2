"""Compiled decoder of float8_e4m3 matrices whose blocks of weights share a scale."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

from llvmlite import ir

from backends.tiles.compiling import compiled_callback
from backends.tiles.loops import decoding_loop
from backends.tiles.memory import i64_at
from backends.tiles.scales import DECODER, scale_at
from backends.tiles.tables import FIRST, N_IN, ROUNDED, WRITTEN

CODES, SCALES, SCALE_KIND, BLOCK_ROWS, BLOCK_COLUMNS = range(FIRST, FIRST + 5)
"""Places in the table: addresses of the codes [n_out, n_in] and of the scales [row blocks, column
blocks], their number format, and the size of a block."""


@decoding_loop
def _decode(vectors, source, index):
    """See float_of_e4m3."""
    codes, scale = source
    builder, code = vectors.builder, vectors.load(codes, index, 8)
    magnitude = vectors.masked(code, 0x7F)
    bits = builder.or_(vectors.left(vectors.masked(code, 0x80), 8), vectors.left(magnitude, 7))
    number = vectors.scaled(vectors.float_of_half(bits), 256.0)
    is_nan = builder.icmp_unsigned("==", magnitude, vectors.same(0x7F))
    number = builder.select(is_nan, vectors.same(math.nan, ir.FloatType()), number)
    return [builder.fmul(number, vectors.spread(scale))]


@compiled_callback(DECODER)
def decode_float8(table, row, num_rows, column, n_columns, out, stride, scratch):
    """See tables.py. W = code * scale."""
    values = i64_at(table)
    n_in, width = values[N_IN], values[BLOCK_COLUMNS]
    per_row = (n_in + width - 1) // width
    for r in range(num_rows):
        scales = (row + r) // values[BLOCK_ROWS] * per_row
        start, block = column, column // width
        while start < column + n_columns:
            end = min((block + 1) * width, column + n_columns)
            scale = scale_at(values[SCALES], scales + block, values[SCALE_KIND])
            codes = values[CODES] + (row + r) * n_in + start
            place = r * stride + start - column
            n = end - start
            _decode((codes, scale), out, place, n, values[ROUNDED], values[WRITTEN])
            start, block = end, block + 1
