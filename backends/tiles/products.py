"""Products of rows with a stored matrix, tile by tile.

A tile has some rows of the matrix, whole if they are stored by rows, so that memory is read in its
order. It is decoded into memory that stays in the second-level cache, and multiplied at once with
all tokens.

Each output is a sum in float32 whose order is always the same, whatever the number of tokens or
threads and on every processor: LANES partial sums are kept over the whole row, and added in halves
at the end (lane i + lane i + 8, and so on). With weights in bfloat16, lane i adds the products of
columns 32 j + 2 i + 1 and then 32 j + 2 i, for j = 0, 1, ...; this is the order of x86's vdpbf16ps,
which is used where there is one. With float32, lane i adds those of columns 16 j + i. Products of
two bfloat16 or float16 are exact in float32, so that fused operations change nothing; vdpbf16ps
alone takes denormal numbers for 0.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,var-annotated"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from backends.tiles.compiling import compiled, inlined
from backends.tiles.memory import HAS_BF16, f32_at, i64_at, u8_at
from backends.tiles.tables import BF16, BY_COLUMNS, MAX_COLUMNS, MAX_TILE_ROWS

LANES = 16
COLUMN_STEP = 2 * LANES
"""Columns are padded with zeros to a multiple of this."""
TOKEN_STEP = 4
"""Several tokens are padded to a multiple of this."""
MAX_TOKENS = 128
"""Maximum tokens of a call: bounds the partial sums."""
TILE_BYTES = 576 << 10
_USUAL_TILE_BYTES = 384 << 10
_WIDE_TILE_BYTES = 576 << 10
_MIN_ROWS = 8
SUM_BYTES = MAX_TILE_ROWS * LANES * 4
"""Bytes of the partial sums for each token."""

_FLOATS, _WORDS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)
_VECTOR_BYTES = 64
binding.initialize_native_asmparser()


def _add_pairs(builder, total, weights, rows):
    """Add the products of 16 pairs of bfloat16, given as words of 32 bits, to 16 sums."""
    if HAS_BF16:
        kind = ir.FunctionType(_FLOATS, [_FLOATS, _WORDS, _WORDS])
        arguments = [total, weights, rows]
        return builder.asm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", arguments, False)
    upper = ir.Constant(_WORDS, [-(1 << 16)] * LANES)
    sixteen = ir.Constant(_WORDS, [16] * LANES)
    second = [builder.bitcast(builder.and_(x, upper), _FLOATS) for x in (weights, rows)]
    first = [builder.bitcast(builder.shl(x, sixteen), _FLOATS) for x in (weights, rows)]
    return _add_floats(builder, _add_floats(builder, total, *second), *first)


def _add_floats(builder, total, weights, rows):
    fused = ("contract",)
    return builder.fadd(total, builder.fmul(weights, rows, flags=fused), flags=fused)


def _block(num_rows: int, n_tokens: int, is_bf16: bool) -> Callable[..., Any]:
    """Return a function that adds products of `num_rows` rows of a tile and `n_tokens` tokens to
    their partial sums, which stay in registers meanwhile."""
    kind, add = (_WORDS, _add_pairs) if is_bf16 else (_FLOATS, _add_floats)
    pairs = [(r, t) for r in range(num_rows) for t in range(n_tokens)]

    def vector(builder, address, offset, element):
        place = builder.add(address, offset)
        return builder.inttoptr(place, element.as_pointer())

    def block(_context, tile, tile_stride, rows, row_stride, n_bytes, sums, is_first):
        def generate(context, builder, signature, arguments):
            tile, tile_stride, rows, row_stride, n_bytes, sums, is_first = arguments
            word = n_bytes.type
            zero = ir.Constant(_FLOATS, [0.0] * LANES)
            totals = []
            for i in range(len(pairs)):
                place = vector(builder, sums, ir.Constant(word, i * _VECTOR_BYTES), _FLOATS)
                totals.append((cgutils.alloca_once(builder, _FLOATS), place))
                before = builder.load(place)
                before.align = _VECTOR_BYTES
                builder.store(builder.select(is_first, zero, before), totals[i][0])
            starts = [
                [builder.add(base, builder.mul(stride, ir.Constant(word, i))) for i in range(n)]
                for base, stride, n in ((tile, tile_stride, num_rows), (rows, row_stride, n_tokens))
            ]
            step = ir.Constant(word, _VECTOR_BYTES)
            nothing = ir.Constant(word, 0)
            with cgutils.for_range_slice(builder, nothing, n_bytes, step, word) as (at, _):
                weights, tokens = (
                    [builder.load(vector(builder, start, at, kind)) for start in own]
                    for own in starts
                )
                for load in (*weights, *tokens):
                    load.align = 2
                for (r, t), (total, _place) in zip(pairs, totals, strict=True):
                    builder.store(add(builder, builder.load(total), weights[r], tokens[t]), total)
            for total, place in totals:
                builder.store(builder.load(total), place).align = _VECTOR_BYTES
            return context.get_dummy_value()

        numbers = (tile, tile_stride, rows, row_stride, n_bytes, sums, types.boolean)
        return types.void(*numbers), generate

    return intrinsic(block)


_of_tokens = _block(4, TOKEN_STEP, is_bf16=True)
_of_token = _block(8, 1, is_bf16=True)
_of_float_tokens = _block(4, TOKEN_STEP, is_bf16=False)
_of_float_token = _block(8, 1, is_bf16=False)


@intrinsic
def _sum_of_lanes(_context, address):
    """Return the sum of the LANES float32 at an address, added in halves."""

    def generate(context, builder, signature, arguments):
        total = builder.load(builder.inttoptr(arguments[0], _FLOATS.as_pointer()))
        total.align = 4
        for n in (8, 4, 2, 1):
            indices = ir.VectorType(ir.IntType(32), n)
            lower, upper = (
                builder.shuffle_vector(
                    total, total, ir.Constant(indices, list(range(start, start + n)))
                )
                for start in (0, n)
            )
            total = builder.fadd(lower, upper)
        return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))

    return types.float32(address), generate


@intrinsic
def _decode(_context, decoder, table, row, num_rows, column, n_columns, out, stride, scratch):
    """Call a decoder by its address."""

    def generate(context, builder, signature, arguments):
        address, *own = arguments
        kind = ir.FunctionType(ir.VoidType(), [address.type] * len(own))
        builder.call(builder.inttoptr(address, kind.as_pointer()), own)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), generate


@inlined
def tile_shape(n_in, size, is_by_columns):
    """Return (rows, columns, numbers between rows) of a tile of numbers of `size` bytes."""
    columns = (n_in + COLUMN_STEP - 1) // COLUMN_STEP * COLUMN_STEP
    widest = MAX_COLUMNS if is_by_columns else TILE_BYTES // (_MIN_ROWS * size) - COLUMN_STEP
    columns = min(columns, widest // COLUMN_STEP * COLUMN_STEP)
    stride = columns + COLUMN_STEP  # not a power of two: rows would share cache sets
    usual = _WIDE_TILE_BYTES if is_by_columns else _USUAL_TILE_BYTES
    rows = usual // (stride * size) // _MIN_ROWS * _MIN_ROWS
    return min(max(rows, _MIN_ROWS), MAX_TILE_ROWS), columns, stride


@compiled(types.void(*[types.int64] * 11))
def decode(
    decoder, table, row, num_rows, column, n_columns, step, out, stride, size, scratch
):  # fmt: skip
    """Decode a part of a matrix into `out`, `stride` numbers of `size` bytes a row.

    step: rows that are decoded at a time, at most MAX_TILE_ROWS.
    """
    for r in range(0, num_rows, step):
        for c in range(0, n_columns, MAX_COLUMNS):
            at, n = out + (r * stride + c) * size, min(MAX_COLUMNS, n_columns - c)
            _decode(
                decoder, table, row + r, min(step, num_rows - r), column + c, n, at, stride, scratch
            )


@inlined
def _clear(tile, num_rows, stride, start, end):
    """Set bytes start..end of each row of a tile to 0."""
    for r in range(num_rows):
        for i in range(r * stride + start, r * stride + end):
            u8_at(tile)[i] = 0


@inlined
def _add_tile(
    tile, stride, num_rows, rows, row_bytes, n_tokens, n_bytes, sums, is_first, is_bf16
):  # fmt: skip
    """Add the products of a tile and all tokens to their partial sums. Rows of the tile after
    `num_rows` take part, and their sums are never read."""
    if n_tokens == 1:
        for r in range(0, num_rows, 8):
            own = sums + r * _VECTOR_BYTES
            if is_bf16:
                _of_token(tile + r * stride, stride, rows, 0, n_bytes, own, is_first)
            else:
                _of_float_token(tile + r * stride, stride, rows, 0, n_bytes, own, is_first)
        return
    for token in range(0, n_tokens, TOKEN_STEP):
        tokens = rows + token * row_bytes
        for r in range(0, num_rows, 4):
            own = sums + (token * MAX_TILE_ROWS + r * TOKEN_STEP) * _VECTOR_BYTES
            if is_bf16:
                _of_tokens(tile + r * stride, stride, tokens, row_bytes, n_bytes, own, is_first)
            else:
                _of_float_tokens(
                    tile + r * stride, stride, tokens, row_bytes, n_bytes, own, is_first
                )


@inlined
def _place(token, row, n_tokens):
    """Return the place of the partial sums of a token and a row of the tile."""
    if n_tokens == 1:
        return row
    group = token // TOKEN_STEP * TOKEN_STEP
    return group * MAX_TILE_ROWS + row // 4 * 4 * TOKEN_STEP + row % 4 * TOKEN_STEP + token - group


@compiled(types.void(*[types.int64] * 13))
def multiply(
    decoder, table, written, n_in, start, end, rows, n_tokens, out, n_out, tile, sums, scratch
):
    """Compute out[token, row] for the rows start..end of a matrix.

    decoder, table: see tables.py. written: BF16, or another kind that writes float32.
    rows: address of the tokens, n_tokens of them (1, or a multiple of TOKEN_STEP), in bfloat16 or
        float32, each of n_in numbers and zeros up to a multiple of COLUMN_STEP.
    out: address of float32 [n_tokens, n_out].
    tile, sums, scratch: addresses of TILE_BYTES, of SUM_BYTES for each token, and of SCRATCH_BYTES.
    """
    is_bf16 = written == BF16
    size = 2 if is_bf16 else 4
    row_bytes = (n_in + COLUMN_STEP - 1) // COLUMN_STEP * COLUMN_STEP * size
    is_by_columns = i64_at(table)[BY_COLUMNS] == 1
    tile_rows, tile_columns, stride = tile_shape(n_in, size, is_by_columns)
    for first in range(start, end, tile_rows):
        num_rows = min(tile_rows, end - first)
        for column in range(0, n_in, tile_columns):
            n = min(tile_columns, n_in - column)
            step = num_rows if is_by_columns else 1
            decode(decoder, table, first, num_rows, column, n, step, tile, stride, size, scratch)
            n_padded = (n + COLUMN_STEP - 1) // COLUMN_STEP * COLUMN_STEP
            if n_padded > n:
                _clear(tile, num_rows, stride * size, n * size, n_padded * size)
            for part in range(0, n_padded, MAX_COLUMNS):
                n_bytes = min(MAX_COLUMNS, n_padded - part) * size
                own, tokens = tile + part * size, rows + (column + part) * size
                is_first = column + part == 0
                _add_tile(
                    own, stride * size, num_rows, tokens, row_bytes, n_tokens, n_bytes, sums,
                    is_first, is_bf16,
                )  # fmt: skip
        for token in range(n_tokens):
            for r in range(num_rows):
                total = _sum_of_lanes(sums + _place(token, r, n_tokens) * _VECTOR_BYTES)
                f32_at(out)[token * n_out + first + r] = total
