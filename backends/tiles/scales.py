"""Scales of stored matrices in all their number formats, and the signature of decoders."""

# mypy: disable-error-code="no-untyped-def,call-arg"

from __future__ import annotations

from numba import types

from backends.tiles.compiling import inlined
from backends.tiles.memory import f32_at, float_of_bits, float_of_half, u8_at, u16_at
from backends.tiles.tables import SCALE_BF16, SCALE_E4M3, SCALE_FLOAT32, SCALE_HALF

DECODER = types.void(*[types.int64] * 8)
"""See tables.py."""


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
