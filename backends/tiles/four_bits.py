"""Compiled decoders of 4-bit matrices whose codes lie in pairs along a row: whole numbers (int4),
float4_e2m1, and GPTQ.

A byte has the weights of two neighbouring columns, the first in the low half.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from numba import types

from backends.tiles.compiling import compiled_callback, inlined
from backends.tiles.loops import decoding_loop
from backends.tiles.memory import f32_at, i32_at, i64_at, u8_at, u32_at
from backends.tiles.scales import DECODER, scale_at
from backends.tiles.tables import FIRST, MAX_COLUMNS, N_IN, ROUNDED, WRITTEN

CODES, SCALES, SCALE_KIND, GROUP, ZEROS, IS_FLOAT, DIVISOR, N_OUT, ORDER = range(FIRST, FIRST + 9)
"""Places in the table: addresses of the codes [n_out, n_in / 2] (GPTQ: words [n_in / 8, n_out]) and
of the scales [n_out, n_in / GROUP] (GPTQ: transposed), their number format, the columns of a group,
the address of zeros packed along n_out (0: all of them are 8), whether codes are float4_e2m1, the
address of a float32 that scales are divided by (0: none), rows of the matrix, and the address of
the group of each column (int32; 0: groups are consecutive columns)."""
_MIDDLE = 8.0
_ROW = 2 * MAX_COLUMNS  # bytes of float32 for each pair of columns


def _halves(vectors, codes, index):
    pairs = vectors.load(codes, index, 8)
    return vectors.masked(pairs, 15), vectors.right(pairs, 4)


@decoding_loop
def _decode_whole(vectors, source, index):
    codes, *scales_and_zeros = source
    scales, zeros = scales_and_zeros[:2], scales_and_zeros[2:]
    weights = []
    for half, scale, zero in zip(_halves(vectors, codes, index), scales, zeros, strict=True):
        number = vectors.builder.fsub(vectors.number(half), vectors.load_floats(zero, index))
        weights.append(vectors.builder.fmul(number, vectors.load_floats(scale, index)))
    return weights


@decoding_loop
def _decode_floats(vectors, source, index):
    """As a float16 with the same exponent and fraction, a code is 2**14 times smaller, also for the
    subnormal 0.5."""
    codes, *scales = source
    builder, weights = vectors.builder, []
    for half, scale in zip(_halves(vectors, codes, index), scales, strict=True):
        sign, magnitude = vectors.masked(half, 8), vectors.masked(half, 7)
        bits = builder.or_(vectors.left(sign, 12), vectors.left(magnitude, 9))
        number = vectors.scaled(vectors.float_of_half(bits), 16384.0)
        weights.append(builder.fmul(number, vectors.load_floats(scale, index)))
    return weights


@inlined
def _fill(address, value, n):
    """Write a float32 `n` times; the usual numbers are whole vectors."""
    numbers = f32_at(address)
    if n == 8:
        for i in range(8):
            numbers[i] = value
    elif n == 16:
        for i in range(16):
            numbers[i] = value
    elif n == 64:
        for i in range(64):
            numbers[i] = value
    else:
        for i in range(n):
            numbers[i] = value


@inlined
def _zero(zeros, row, group, n_groups):
    """Return the zero point of a group: eight rows have theirs in four bytes."""
    pair = u8_at(zeros)[((row >> 3) * n_groups + group) * 4 + ((row & 7) >> 1)]
    return types.float32(types.int32(pair >> 4 if row & 1 else pair & 15))


@inlined
def _divided(scale, divisor):
    if divisor:
        return scale / f32_at(divisor)[0]
    return scale


@inlined
def _spread(table, row, column, n_columns, scales, zeros):
    """Write the scale and the zero of each pair of columns: then one loop decodes a whole row, even
    of small groups. Return whether the second columns of pairs have others, at _ROW bytes more."""
    values = i64_at(table)
    source, kind, size = values[SCALES], values[SCALE_KIND], values[GROUP]
    packed_zeros, divisor = values[ZEROS], values[DIVISOR]
    n_groups = values[N_IN] // size
    first = row * n_groups
    if size % 2 == 0:
        start, group = column, column // size
        while start < column + n_columns:
            end = min((group + 1) * size, column + n_columns)
            at, n = 2 * (start - column), (end - start) >> 1
            _fill(scales + at, _divided(scale_at(source, first + group, kind), divisor), n)
            if packed_zeros:
                _fill(zeros + at, _zero(packed_zeros, row, group, n_groups), n)
            start, group = end, group + 1
    else:
        for i in range(n_columns):
            group = (column + i) // size
            at = i // 2 * 4 + i % 2 * _ROW
            scale = _divided(scale_at(source, first + group, kind), divisor)
            f32_at(scales + at)[0] = scale
            if packed_zeros:
                f32_at(zeros + at)[0] = _zero(packed_zeros, row, group, n_groups)
    if not packed_zeros:
        _fill(zeros, types.float32(_MIDDLE), n_columns // 2)
    return size % 2 != 0


@compiled_callback(DECODER)
def decode_four_bits(table, row, num_rows, column, n_columns, out, stride, scratch):
    """See tables.py. W = (code - zero) * scale; `column` is even."""
    values = i64_at(table)
    n_in, rounded, written = values[N_IN], values[ROUNDED], values[WRITTEN]
    first_codes, is_float = values[CODES], values[IS_FLOAT]
    zeros = scratch + 2 * _ROW
    for r in range(num_rows):
        is_odd = _spread(table, row + r, column, n_columns, scratch, zeros)
        codes = first_codes + ((row + r) * n_in + column) // 2
        odd_zeros = zeros + _ROW if is_odd and values[ZEROS] else zeros
        odd_scales = scratch + _ROW if is_odd else scratch
        place, n = r * stride, n_columns // 2
        if is_float:
            _decode_floats((codes, scratch, odd_scales), out, place, n, rounded, written)
        else:
            source = (codes, scratch, odd_scales, zeros, odd_zeros)
            _decode_whole(source, out, place, n, rounded, written)


@inlined
def _spread_gptq(table, row, column, n_columns, scales, zeros):
    """See _spread. A zero z is stored as z - 1 in four bits."""
    values = i64_at(table)
    source, kind, size = values[SCALES], values[SCALE_KIND], values[GROUP]
    packed_zeros, n_out, order = values[ZEROS], values[N_OUT], values[ORDER]
    shift = types.uint32(4 * (row % 8))
    if size % 2 == 0 and not order:
        start, group = column, column // size
        while start < column + n_columns:
            end = min((group + 1) * size, column + n_columns)
            at, n = 2 * (start - column), (end - start) >> 1
            word = u32_at(packed_zeros)[group * (n_out >> 3) + (row >> 3)]
            _fill(scales + at, scale_at(source, group * n_out + row, kind), n)
            _fill(zeros + at, types.float32(types.int32((word >> shift) + 1 & 15)), n)
            start, group = end, group + 1
        return False
    for i in range(n_columns):
        group = i32_at(order)[column + i] if order else (column + i) // size
        at = i // 2 * 4 + i % 2 * _ROW
        word = u32_at(packed_zeros)[group * (n_out >> 3) + (row >> 3)]
        f32_at(scales + at)[0] = scale_at(source, group * n_out + row, kind)
        f32_at(zeros + at)[0] = types.float32(types.int32((word >> shift) + 1 & 15))
    return True


@compiled_callback(DECODER)
def decode_gptq(table, row, num_rows, column, n_columns, out, stride, scratch):
    """See tables.py. W = (code - zero) * scale; `column` is a multiple of 8. The words of a tile
    are transposed: then eight columns of a row are as in other 4-bit matrices."""
    values = i64_at(table)
    n_out, rounded, written = values[N_OUT], values[ROUNDED], values[WRITTEN]
    words, codes = values[CODES], scratch + 4 * _ROW
    row_words = MAX_COLUMNS // 8 + 16  # not a power of two: rows would share cache sets
    for w in range(n_columns // 8):
        own = words + 4 * ((column // 8 + w) * n_out + row)
        for r in range(num_rows):
            u32_at(codes)[r * row_words + w] = u32_at(own)[r]
    zeros = scratch + 2 * _ROW
    for r in range(num_rows):
        odd = _ROW if _spread_gptq(table, row + r, column, n_columns, scratch, zeros) else 0
        source = (codes + 4 * r * row_words, scratch, scratch + odd, zeros, zeros + odd)
        _decode_whole(source, out, r * stride, n_columns // 2, rounded, written)
