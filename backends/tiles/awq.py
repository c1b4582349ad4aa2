"""Compiled decoder of 4-bit AWQ matrices, whose words have eight rows of a column."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from numba import types

from backends.tiles.compiling import compiled_callback, inlined
from backends.tiles.loops import decoding_loop
from backends.tiles.memory import i64_at, u32_at
from backends.tiles.scales import DECODER, scale_at
from backends.tiles.tables import FIRST, MAX_COLUMNS, ROUNDED, WRITTEN

WORDS, SCALES, SCALE_KIND, GROUP, ZEROS, N_OUT = range(FIRST, FIRST + 6)
"""Places in the table: addresses of the words [n_in, n_out / 8] and of the scales [groups, n_out],
their number format, the columns of a group, the address of the zeros, and rows of the matrix."""
_STRIDE = MAX_COLUMNS + 16  # not a power of two: rows would share cache sets


@inlined
def _nibble(word, shift):
    return types.float32(types.int32(word >> shift & types.uint32(15)))


@decoding_loop
def _decode_row(vectors, source, index):
    words, shift, zero, scale = source
    builder = vectors.builder
    shifted = builder.lshr(vectors.load(words, index, 32), vectors.spread(shift))
    number = vectors.number(vectors.masked(shifted, 15))
    number = builder.fsub(number, vectors.spread(zero))
    return [builder.fmul(number, vectors.spread(scale))]


@compiled_callback(DECODER)
def decode_awq(table, row, num_rows, column, n_columns, out, stride, scratch):
    """See tables.py. W = (code - zero) * scale; `row` and `num_rows` are multiples of 8."""
    values = i64_at(table)
    size, n_out, scales, kind = values[GROUP], values[N_OUT], values[SCALES], values[SCALE_KIND]
    words, packed_zeros = values[WORDS], values[ZEROS]
    rounded, written = values[ROUNDED], values[WRITTEN]
    n_words, of_eights = n_out // 8, num_rows // 8
    for i in range(n_columns):
        own = words + 4 * ((column + i) * n_words + row // 8)
        for k in range(of_eights):
            u32_at(scratch)[k * _STRIDE + i] = u32_at(own)[k]
    for k in range(of_eights):
        eight = row // 8 + k
        start, group = column, column // size
        while start < column + n_columns:
            end = min((group + 1) * size, column + n_columns)
            zeros = u32_at(packed_zeros)[group * n_words + eight]
            for j in range(8):
                shift = types.uint32((j >> 1) * 4 + (j & 1) * 16)  # even rows: the lower half
                scale = scale_at(scales, group * n_out + 8 * eight + j, kind)
                own = scratch + 4 * (k * _STRIDE + start - column)
                place = (8 * k + j) * stride + start - column
                source = (own, shift, _nibble(zeros, shift), scale)
                _decode_row(source, out, place, end - start, rounded, written)
            start, group = end, group + 1
