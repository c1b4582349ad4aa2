"""Compiled decoder of bf16 in twelve bits (docs/packed.md)."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from numba import types

from backends.tiles.compiling import compiled_callback, inlined
from backends.tiles.loops import decoding_loop
from backends.tiles.memory import i64_at, u8_at, u16_at
from backends.tiles.scales import DECODER
from backends.tiles.tables import ERROR, FIRST, N_IN, ROUNDED, WRITTEN

SIGNS, CODES, BASE, POSITIONS, EXPONENTS, N_EXCEPTIONS = range(FIRST, FIRST + 6)
"""Places in the table: addresses of the planes, the base, addresses of int64 positions and of
uint16 exponents of exceptions, and their number."""
_HALF_BLOCK = 512


def _loop_of(take_code):
    """Return a decoding loop; take_code: returns the codes of a vector of their bytes."""

    def emit(vectors, source, index):
        signs, codes, base = source
        builder = vectors.builder
        own, code = vectors.load(signs, index, 8), take_code(vectors, vectors.load(codes, index, 8))
        has_code = builder.icmp_unsigned("!=", code, vectors.same(0))
        exponent = builder.add(code, vectors.spread(base))
        exponent = builder.select(has_code, exponent, vectors.same(0))
        bits = builder.or_(vectors.left(vectors.masked(own, 0x80), 8), vectors.masked(own, 0x7F))
        return [builder.or_(bits, vectors.left(exponent, 7))]

    return decoding_loop(emit, has_bits=True)


_decode_lower = _loop_of(lambda vectors, pairs: vectors.masked(pairs, 15))
_decode_upper = _loop_of(lambda vectors, pairs: vectors.right(pairs, 4))


@lambda emit: decoding_loop(emit, has_bits=True)
def _put_bits(vectors, source, _index):
    return [vectors.spread(source[0])]


@inlined
def _put_exceptions(table, first, end, out, place, rounded, written):
    values = i64_at(table)
    positions, exponents = i64_at(values[POSITIONS]), u16_at(values[EXPONENTS])
    low, high = 0, values[N_EXCEPTIONS]
    while low < high:  # the first exception from `first` on
        middle = (low + high) // 2
        if positions[middle] < first:
            low = middle + 1
        else:
            high = middle
    while low < values[N_EXCEPTIONS] and positions[low] < end:
        at = positions[low]
        in_block = at % (2 * _HALF_BLOCK)
        code = u8_at(values[CODES])[at // (2 * _HALF_BLOCK) * _HALF_BLOCK + in_block % _HALF_BLOCK]
        if (code >> 4 if in_block >= _HALF_BLOCK else code & 15) != 0:
            values[ERROR] = 1
        own = u8_at(values[SIGNS])[at]
        bits = types.uint32(own & 0x80) << 8 | types.uint32(own & 0x7F)
        bits |= types.uint32(exponents[low]) << 7
        _put_bits((types.int32(bits),), out, place + at - first, 1, rounded, written)
        low += 1


@compiled_callback(DECODER)
def decode_twelve_bits(table, row, num_rows, column, n_columns, out, stride, scratch):
    """See tables.py. An exception that has a code sets ERROR."""
    values = i64_at(table)
    written, rounded = values[WRITTEN], values[ROUNDED]
    for r in range(num_rows):
        first = (row + r) * values[N_IN] + column
        end = first + n_columns
        start = first
        while start < end:
            half = start // _HALF_BLOCK
            n = min((half + 1) * _HALF_BLOCK, end) - start
            place = r * stride + start - first
            signs = values[SIGNS] + start
            codes = values[CODES] + half // 2 * _HALF_BLOCK + start % _HALF_BLOCK
            source = (signs, codes, types.int32(values[BASE]))
            if half % 2:
                _decode_upper(source, out, place, n, rounded, written)
            else:
                _decode_lower(source, out, place, n, rounded, written)
            start += n
        if values[N_EXCEPTIONS]:
            _put_exceptions(table, first, end, out, r * stride, rounded, written)
