"""Memory by its address, and conversions of numbers, for compiled loops.

Nothing here checks bounds: callers have checked the sizes of all parts (Codec.check).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

I16, I32, FLOAT, HALF = ir.IntType(16), ir.IntType(32), ir.FloatType(), ir.HalfType()


def _pointer_to(kind: types.Type) -> Callable[..., Any]:
    def pointer(_context, address):
        def generate(context, builder, signature, arguments):
            pointee = context.get_value_type(kind)
            return builder.inttoptr(arguments[0], pointee.as_pointer())

        return types.CPointer(kind)(address), generate

    return intrinsic(pointer)


u8_at = _pointer_to(types.uint8)
u16_at = _pointer_to(types.uint16)
u32_at = _pointer_to(types.uint32)
i32_at = _pointer_to(types.int32)
i64_at = _pointer_to(types.int64)
f32_at = _pointer_to(types.float32)
"""Pointers to memory at an address (int64)."""


@intrinsic
def float_of_bits(_context, bits):
    """Return the float32 that has these 32 bits."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(_as_u32(context, builder, signature, arguments), FLOAT)

    return types.float32(bits), generate


@intrinsic
def float_of_half(_context, bits):
    """Return the float32 of a float16 with these 16 bits; exact."""

    def generate(context, builder, signature, arguments):
        wide = _as_u32(context, builder, signature, arguments)
        return builder.fpext(builder.bitcast(builder.trunc(wide, I16), HALF), FLOAT)

    return types.float32(bits), generate


class _BFloat(ir.types._BaseFloatType):
    """LLVM's bfloat, which llvmlite does not name."""

    def __str__(self) -> str:
        return "bfloat"


_BFloat._create_instance()
BFLOAT = _BFloat()
HAS_BF16 = bool(binding.get_host_cpu_features().get("avx512bf16", False))
"""Whether this processor has AVX-512's instructions for bfloat16."""


def _as_u32(context, builder, signature, arguments):
    return context.cast(builder, arguments[0], signature.args[0], types.uint32)
