"""How weights are stored: floats, or ggml's blocks of quantised numbers.

A row of a tensor is a row of blocks. Zeros stay exactly zero in every format, which is what
`bench.synth.growth` needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from specdec.pair.gguf_file import import_gguf

_Q6_K_BLOCK = 256
_Q6_K_GROUP = 16  # weights that share one scale


@dataclass(frozen=True)
class WeightFormat:
    """One way of storing weights.

    `encode` takes float32 [n_blocks, block_size] and returns uint8 [n_blocks, block_bytes].
    """

    name: str  # the same in safetensors and in ggml
    block_size: int  # weights
    block_bytes: int
    encode: Callable[[np.ndarray], np.ndarray]

    @property
    def bytes_per_weight(self) -> float:
        return self.block_bytes / self.block_size

    def n_bytes(self, n_weights: int) -> int:
        """Bytes of so many weights, which must fill whole blocks."""
        assert n_weights % self.block_size == 0
        return n_weights // self.block_size * self.block_bytes


def _encode_float(dtype: str, blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks, dtype=dtype).view(np.uint8)


def _encode_bf16(blocks: np.ndarray) -> np.ndarray:
    """The upper half of a float32, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(blocks, dtype="<f4").view("<u4")
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype("<u2").view(np.uint8)


def _encode_ggml(kind: str, blocks: np.ndarray) -> np.ndarray:
    gguf = import_gguf()
    return gguf.quants.quantize(blocks, gguf.GGMLQuantizationType[kind])


def _encode_q6_k(blocks: np.ndarray) -> np.ndarray:
    """ggml's block_q6_K: 16 groups of 16 six-bit numbers, each with an 8-bit scale.

    The layout is dequantize_row_q6_K's in ggml-quants.c (the gguf package only decodes it). The
    weight of the largest magnitude in a group becomes -32, without ggml's search for a scale of
    less error.
    """
    groups = np.asarray(blocks, np.float32).reshape(-1, _Q6_K_BLOCK // _Q6_K_GROUP, _Q6_K_GROUP)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], axis=-1)[..., 0]
    steps = largest / -32
    unit = (np.abs(steps).max(axis=-1) / 127).astype(np.float16)
    scales = np.rint(_divide(steps, unit.astype(np.float32)[:, None])).clip(-128, 127)
    width = unit.astype(np.float32)[:, None, None] * scales[..., None]
    numbers = np.rint(_divide(groups, width)).clip(-32, 31).astype(np.int8) + np.int8(32)
    # Two halves of 4 x 32 numbers; byte i of `low` holds numbers i and i + 64 of its half.
    parts = numbers.view(np.uint8).reshape(-1, 2, 4, 32)
    low = (parts[:, :, :2] & 15) | ((parts[:, :, 2:] & 15) << 4)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = np.bitwise_or.reduce((parts >> 4) << shifts, axis=2)
    n_blocks = len(groups)
    return np.hstack(
        [
            low.reshape(n_blocks, -1),
            high.reshape(n_blocks, -1),
            scales.astype(np.int8).view(np.uint8),
            unit.astype("<f2").view(np.uint8).reshape(n_blocks, 2),
        ]
    )


def _divide(values: np.ndarray, by: np.ndarray) -> np.ndarray:
    """The quotient, 0 where the divisor is 0."""
    return np.divide(values, by, out=np.zeros_like(values), where=by != 0)


F32 = WeightFormat("F32", 1, 4, partial(_encode_float, "<f4"))
F16 = WeightFormat("F16", 1, 2, partial(_encode_float, "<f2"))
BF16 = WeightFormat("BF16", 1, 2, _encode_bf16)
Q8_0 = WeightFormat("Q8_0", 32, 34, partial(_encode_ggml, "Q8_0"))
Q4_0 = WeightFormat("Q4_0", 32, 18, partial(_encode_ggml, "Q4_0"))
Q6_K = WeightFormat("Q6_K", _Q6_K_BLOCK, 210, _encode_q6_k)
