"""Coding of twelve-bit planes with numpy, in pieces that stay in the processor's cache."""

from __future__ import annotations

import numpy as np

BLOCK = 1024
"""Weights of a block of codes: byte i has the code of weight i in its low half, and the code of
weight i + BLOCK / 2 in its high half."""
_HALF = BLOCK // 2
_AT_ONCE = 64 * BLOCK
_SIGN_AND_MANTISSA = np.int16(0x807F - 0x10000)
_LEFT_BY_7 = np.int16(128)


def decode(signs: np.ndarray, codes: np.ndarray, base: int, out: np.ndarray) -> None:
    """Fill `out` (uint16 [n]) from signs (uint8 [n]) and codes of whole blocks; the exponents of
    exceptions remain 0."""
    for start in range(0, len(out), _AT_ONCE):
        end = min(start + _AT_ONCE, len(out))
        n_blocks = -(-(end - start) // BLOCK)
        pairs = codes[start // 2 : start // 2 + n_blocks * _HALF].reshape(n_blocks, _HALF)
        exponents = np.empty((n_blocks, 2, _HALF), np.uint8)
        np.bitwise_and(pairs, 15, out=exponents[:, 0])
        np.right_shift(pairs, 4, out=exponents[:, 1])
        exponents += (exponents != 0).view(np.uint8) * np.uint8(base)
        weights = out[start:end].view(np.int16)
        np.copyto(weights, exponents.reshape(-1)[: end - start])
        weights *= _LEFT_BY_7
        # Widening a signed byte extends its sign to the left.
        own = signs[start:end].view(np.int8).astype(np.int16)
        own &= _SIGN_AND_MANTISSA
        weights |= own


def encode(weights: np.ndarray, base: int, signs: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Fill the zeroed planes of whole blocks; return the positions of exceptions, ascending."""
    positions = []
    for start in range(0, len(weights), _AT_ONCE):
        some = weights[start : start + _AT_ONCE]
        signs[start : start + len(some)] = some >> np.uint16(8) & np.uint16(0x80)
        signs[start : start + len(some)] |= (some & np.uint16(0x7F)).astype(np.uint8)
        exponents = (some >> np.uint16(7)).astype(np.uint8)
        own = exponents - np.uint8(base)
        is_coded = (own >= 1) & (own <= 15) & (exponents > base)
        padded = np.zeros(-(-len(some) // BLOCK) * BLOCK, np.uint8)
        np.multiply(own, is_coded, out=padded[: len(some)])
        halves = padded.reshape(-1, 2, _HALF)
        pairs = halves[:, 0] | halves[:, 1] << np.uint8(4)
        codes[start // 2 : (start + len(padded)) // 2] = pairs.reshape(-1)
        positions.append(np.flatnonzero((exponents != 0) & ~is_coded) + start)
    return np.concatenate(positions) if positions else np.zeros(0, np.int64)
