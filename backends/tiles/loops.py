"""Loops that decode weights of a row, LANES at a time and the remaining ones one by one.

The compiler's own vectors are too short for such loops, so they are written as vector instructions
of LLVM, which has them on every processor.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from backends.tiles.compiling import inlined
from backends.tiles.memory import BFLOAT, HAS_BF16
from backends.tiles.tables import AS_BF16, AS_HALF, BF16, FLOAT32, FULL, HALF, HALF_AS_FLOAT32

LANES = 16
_I16, _I32, _FLOAT, _HALF = ir.IntType(16), ir.IntType(32), ir.FloatType(), ir.HalfType()


class Vectors:
    """Instructions on vectors of `width` numbers; whole numbers have 32 bits."""

    def __init__(self, builder: Any, width: int) -> None:
        self.builder, self.width = builder, width

    def kind(self, element: Any) -> Any:
        return ir.VectorType(element, self.width)

    def load(self, address: Any, index: Any, bits: int) -> Any:
        """Load unsigned numbers of `bits` bits, from number `index` on."""
        loaded = self.load_as(address, index, ir.IntType(bits))
        return loaded if bits == 32 else self.builder.zext(loaded, self.kind(_I32))

    def load_floats(self, address: Any, index: Any) -> Any:
        return self.load_as(address, index, _FLOAT)

    def load_as(self, address: Any, index: Any, element: Any) -> Any:
        size = _bytes(element)
        place = self.builder.add(address, self.builder.mul(index, ir.Constant(index.type, size)))
        loaded = self.builder.load(self.builder.inttoptr(place, self.kind(element).as_pointer()))
        loaded.align = size
        return loaded

    def store(self, value: Any, address: Any, index: Any) -> None:
        size = _bytes(value.type.element)
        place = self.builder.add(address, self.builder.mul(index, ir.Constant(index.type, size)))
        pointer = self.builder.inttoptr(place, value.type.as_pointer())
        self.builder.store(value, pointer).align = size

    def same(self, value: float, element: Any = _I32) -> Any:
        return ir.Constant(self.kind(element), [value] * self.width)

    def spread(self, scalar: Any) -> Any:
        """Return a vector of equal numbers."""
        vector = ir.Constant(self.kind(scalar.type), ir.Undefined)
        for i in range(self.width):
            vector = self.builder.insert_element(vector, scalar, ir.Constant(_I32, i))
        return vector

    def masked(self, value: Any, mask: int) -> Any:
        return self.builder.and_(value, self.same(mask))

    def left(self, value: Any, n: int) -> Any:
        return self.builder.shl(value, self.same(n))

    def right(self, value: Any, n: int) -> Any:
        return self.builder.lshr(value, self.same(n))

    def number(self, value: Any) -> Any:
        return self.builder.sitofp(value, self.kind(_FLOAT))

    def scaled(self, value: Any, factor: float) -> Any:
        return self.builder.fmul(value, self.same(factor, _FLOAT))

    def float_of_half(self, bits: Any) -> Any:
        narrow = self.builder.trunc(bits, self.kind(_I16))
        return self.builder.fpext(self.builder.bitcast(narrow, self.kind(_HALF)), self.kind(_FLOAT))

    def float_of_bf16(self, bits: Any) -> Any:
        return self.builder.bitcast(self.left(bits, 16), self.kind(_FLOAT))

    def half_bits(self, value: Any) -> Any:
        return self.builder.bitcast(self.builder.fptrunc(value, self.kind(_HALF)), self.kind(_I16))

    def bf16_bits(self, value: Any) -> Any:
        """Round to bfloat16, to the nearest, ties to even.

        AVX-512's instruction rounds denormal numbers to 0, for which its products take them anyway.
        """
        builder = self.builder
        if HAS_BF16:
            return builder.bitcast(builder.fptrunc(value, self.kind(BFLOAT)), self.kind(_I16))
        bits = builder.bitcast(value, self.kind(_I32))
        half = builder.add(self.masked(self.right(bits, 16), 1), self.same(0x7FFF))
        # The sum would overflow for some NaN.
        is_nan = builder.fcmp_unordered("uno", value, value)
        chosen = builder.select(is_nan, self.same(0x7FC00000), builder.add(bits, half))
        return builder.trunc(self.right(chosen, 16), self.kind(_I16))

    def rounded(self, value: Any, rounded: int) -> Any:
        if rounded == FULL:
            return value
        bits = self.half_bits(value) if rounded == AS_HALF else self.bf16_bits(value)
        wide = self.builder.zext(bits, self.kind(_I32))
        return self.float_of_half(wide) if rounded == AS_HALF else self.float_of_bf16(wide)

    def written(self, value: Any, written: int) -> Any:
        if written == BF16:
            return self.bf16_bits(value)
        if written == HALF:
            return self.half_bits(value)
        return value if written == FLOAT32 else self.rounded(value, AS_HALF)

    def interleaved(self, parts: Sequence[Any]) -> Any:
        """Return the numbers of one vector, or those of two in turn."""
        if len(parts) == 1:
            return parts[0]
        order = [i + part * self.width for i in range(self.width) for part in (0, 1)]
        mask = ir.Constant(ir.VectorType(_I32, len(order)), order)
        return self.builder.shuffle_vector(*parts, mask)


Emit = Callable[[Vectors, Sequence[Any], Any], Sequence[Any]]
"""(vectors, source, index) -> vectors of float32: the weights from number `index` of the source on;
two vectors have the weights of pairs, first and second."""


def decoding_loop(emit: Emit, *, has_bits: bool = False) -> Callable[..., Any]:
    """Return a compiled function (source, out, place, n, rounded, written) that decodes `n` numbers
    of a source, with one or two weights each, to the entries of `out` from `place` on.

    has_bits: `emit` gives whole numbers, the bits of bfloat16.
    """
    loops = {
        (rounded, written): _loop(emit, has_bits, rounded, written)
        for rounded in (FULL, AS_HALF, AS_BF16)
        for written in (BF16, HALF, FLOAT32, HALF_AS_FLOAT32)
    }
    to_bf16, half_to_bf16 = loops[FULL, BF16], loops[AS_HALF, BF16]
    to_half, bf16_to_half = loops[FULL, HALF], loops[AS_BF16, HALF]
    to_float, half_to_float = loops[FULL, FLOAT32], loops[AS_HALF, FLOAT32]
    bf16_to_float = loops[AS_BF16, FLOAT32]
    to_wide_half, bf16_to_wide_half = loops[FULL, HALF_AS_FLOAT32], loops[AS_BF16, HALF_AS_FLOAT32]

    @inlined
    def decode(source, out, place, n, rounded, written):
        if written == BF16:
            if rounded == AS_HALF:
                half_to_bf16(source, out, place, n)
            else:
                to_bf16(source, out, place, n)
        elif written == HALF:
            if rounded == AS_BF16:
                bf16_to_half(source, out, place, n)
            else:
                to_half(source, out, place, n)
        elif written == FLOAT32:
            if rounded == AS_HALF:
                half_to_float(source, out, place, n)
            elif rounded == AS_BF16:
                bf16_to_float(source, out, place, n)
            else:
                to_float(source, out, place, n)
        elif rounded == AS_BF16:
            bf16_to_wide_half(source, out, place, n)
        else:
            to_wide_half(source, out, place, n)

    return decode


def _loop(emit: Emit, has_bits: bool, rounded: int, written: int) -> Callable[..., Any]:
    def loop(_context, source, out, place, n):
        def generate(context, builder, signature, arguments):
            parts, out, place, n = arguments
            own = cgutils.unpack_tuple(builder, parts)
            n_whole = builder.and_(n, ir.Constant(n.type, -LANES))
            bounds = ((LANES, ir.Constant(n.type, 0), n_whole), (1, n_whole, n))
            for width, start, end in bounds:
                vectors = Vectors(builder, width)
                step = ir.Constant(n.type, width)
                with cgutils.for_range_slice(builder, start, end, step, n.type) as (index, _):
                    weights = emit(vectors, own, index)
                    if has_bits and written == BF16:
                        stored = [builder.trunc(x, vectors.kind(_I16)) for x in weights]
                    else:
                        if has_bits:
                            weights = [vectors.float_of_bf16(x) for x in weights]
                        stored = [
                            vectors.written(vectors.rounded(x, rounded), written) for x in weights
                        ]
                    at = builder.add(place, builder.mul(index, ir.Constant(n.type, len(stored))))
                    vectors.store(vectors.interleaved(stored), out, at)
            return context.get_dummy_value()

        return types.void(source, types.int64, types.int64, types.int64), generate

    return intrinsic(loop)


def _bytes(element: Any) -> int:
    return 4 if element == _FLOAT else int(element.width) // 8
