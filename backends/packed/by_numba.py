"""Coding of twelve-bit planes in compiled loops, with the same bits as by_numpy.

Compiled once per machine and cached by numba beside this file or in the user's cache folder; once
per process if neither is writable.
"""

from __future__ import annotations

import numba
import numpy as np

from backends.packed.by_numpy import BLOCK
from backends.tiles.compiling import compiled

_HALF = BLOCK // 2
_U8, _U16 = np.uint8, np.uint16
_BYTES = numba.types.Array(numba.uint8, 1, "C", readonly=True)
_WEIGHTS = numba.types.Array(numba.uint16, 1, "C", readonly=True)


@compiled(numba.void(_BYTES, _BYTES, numba.uint16, numba.uint16[::1]))
def _decode(signs, codes, base, out):  # type: ignore[no-untyped-def]
    for start in range(0, len(out), BLOCK):
        pairs = codes[start // 2 : start // 2 + _HALF]
        own, weights = signs[start : start + _HALF], out[start : start + _HALF]
        for i in range(len(weights)):
            code = _U16(pairs[i] & _U8(15))
            exponent = code + base if code != 0 else _U16(0)
            sign = _U16(own[i] & _U8(0x80)) << _U16(8)
            weights[i] = sign | _U16(exponent << _U16(7)) | _U16(own[i] & _U8(0x7F))
        own, weights = (
            signs[start + _HALF : start + BLOCK],
            out[start + _HALF : start + BLOCK],
        )
        for i in range(len(weights)):
            code = _U16(pairs[i] >> _U8(4))
            exponent = code + base if code != 0 else _U16(0)
            sign = _U16(own[i] & _U8(0x80)) << _U16(8)
            weights[i] = sign | _U16(exponent << _U16(7)) | _U16(own[i] & _U8(0x7F))


@compiled(numba.int64[::1](_WEIGHTS, numba.uint16, numba.uint8[::1], numba.uint8[::1]))
def _encode(weights, base, signs, codes):  # type: ignore[no-untyped-def]
    # Loops over slices with one result each, which the compiler can vectorise.
    positions, num_found = np.empty(len(weights), np.int64), 0
    own, is_left_out = np.zeros(BLOCK, np.uint8), np.zeros(BLOCK, np.uint8)
    low, high = own[:_HALF], own[_HALF:]
    for start in range(0, len(weights), BLOCK):
        some = weights[start : start + BLOCK]
        signs_here = signs[start : start + len(some)]
        for i in range(len(some)):
            sign = _U8((some[i] >> _U16(8)) & _U16(0x80))
            signs_here[i] = sign | _U8(some[i] & _U16(0x7F))
        own[len(some) :] = 0
        is_left_out[len(some) :] = 0
        for i in range(len(some)):
            exponent = _U16((some[i] >> _U16(7)) & _U16(255))
            place = _U16(exponent - base - _U16(1))
            own[i] = _U8(place + _U16(1)) if place < _U16(15) else _U8(0)
        for i in range(len(some)):
            exponent = _U16((some[i] >> _U16(7)) & _U16(255))
            place = _U16(exponent - base - _U16(1))
            is_left_out[i] = _U8(place >= _U16(15)) & _U8(exponent != _U16(0))
        n_here = 0
        for i in range(BLOCK):
            n_here += is_left_out[i]
        if n_here:
            for i in range(len(some)):
                if is_left_out[i]:
                    positions[num_found] = start + i
                    num_found += 1
        pairs = codes[start // 2 : start // 2 + _HALF]
        for i in range(_HALF):
            pairs[i] = low[i] | (high[i] << _U8(4))
    return positions[:num_found].copy()


def decode(signs: np.ndarray, codes: np.ndarray, base: int, out: np.ndarray) -> None:
    """See by_numpy."""
    _decode(signs, codes, base, out)


def encode(weights: np.ndarray, base: int, signs: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """See by_numpy."""
    return _encode(weights, base, signs, codes)
