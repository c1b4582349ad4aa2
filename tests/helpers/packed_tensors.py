"""Tensors packed in twelve bits, whole and in memory."""

from __future__ import annotations

import numpy as np

from backends.packed.twelve_bits import TwelveBits, header


def packed(codec: TwelveBits, weights: np.ndarray, base: int) -> np.ndarray:
    """Pack a whole tensor as one piece."""
    signs, codes, exceptions = codec.encode(weights, base)
    first = np.frombuffer(header(base, len(exceptions)), np.uint8)
    return np.concatenate([first, signs, codes, exceptions.astype("<u8").view(np.uint8)])


def decoded(codec: TwelveBits, stored: np.ndarray, n_weights: int) -> np.ndarray:
    out = np.full(2 * n_weights, 0xAA, np.uint8)
    codec.opened(stored, n_weights)(0, n_weights, out)
    return out.view(np.uint16)


def weights_of(seed: int, n: int, exponents: list[int]) -> np.ndarray:
    """Return weights with any signs and mantissas, and one of these exponents."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**16, n, dtype=np.uint16) & np.uint16(0x807F)
    return bits | rng.choice(np.array(exponents, np.uint16), n) << np.uint16(7)
