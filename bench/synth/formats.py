"""Storage formats of weights: floats, or ggml's blocks of quantised numbers.

A row of a tensor is a row of blocks. Zeros stay exactly zero, as `bench.synth.growth` requires; in
some formats only if all weights of a group are zeros (`WeightFormat.zero_group`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from backends.ggml.operators import load_ggml
from bench.synth.gguf_file import import_gguf


@dataclass(frozen=True)
class WeightFormat:
    """Storage format of weights.

    `encode` takes float32 [n_blocks, block_size] and returns uint8 [n_blocks, block_bytes]. Raises
    LlamaError or SynthError if a package is not installed.
    """

    name: str  # the same in safetensors and in ggml
    block_size: int  # weights
    block_bytes: int
    encode: Callable[[np.ndarray], np.ndarray]
    zero_group: int = 1  # zeros are exact only in groups of so many zeros

    def n_bytes(self, n_weights: int) -> int:
        """Return the bytes of so many weights, which must fill whole blocks."""
        assert n_weights % self.block_size == 0
        return n_weights // self.block_size * self.block_bytes


def _encode_float(dtype: str, blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks, dtype=dtype).view(np.uint8)


def _encode_bf16(blocks: np.ndarray) -> np.ndarray:
    """Encode as the upper half of a float32, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(blocks, dtype="<f4").view("<u4")
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype("<u2").view(np.uint8)


def _encode_ggml(kind: str, n_bytes: int, blocks: np.ndarray) -> np.ndarray:
    """Encode by ggml as llama-quantize does without an importance matrix, block by block."""
    values = np.ascontiguousarray(blocks, np.float32)
    made = np.empty((len(values), n_bytes), np.uint8)
    type_id = int(import_gguf().GGMLQuantizationType[kind])
    addresses = (values.ctypes.data, made.ctypes.data)
    n_made = load_ggml().quantize(type_id, *addresses, 0, *values.shape, None)
    assert n_made == made.nbytes
    return made


def _of_ggml(name: str, block_size: int, block_bytes: int, zero_group: int = 1) -> WeightFormat:
    encode = partial(_encode_ggml, name, block_bytes)
    return WeightFormat(name, block_size, block_bytes, encode, zero_group)


F32 = WeightFormat("F32", 1, 4, partial(_encode_float, "<f4"))
F16 = WeightFormat("F16", 1, 2, partial(_encode_float, "<f2"))
BF16 = WeightFormat("BF16", 1, 2, _encode_bf16)
Q8_0 = _of_ggml("Q8_0", 32, 34)
MXFP4 = _of_ggml("MXFP4", 32, 17)
Q4_0 = _of_ggml("Q4_0", 32, 18)
Q5_0 = _of_ggml("Q5_0", 32, 22)
Q5_1 = _of_ggml("Q5_1", 32, 24, zero_group=32)
IQ4_NL = _of_ggml("IQ4_NL", 32, 18, zero_group=32)
IQ4_XS = _of_ggml("IQ4_XS", 256, 136, zero_group=32)
Q4_K = _of_ggml("Q4_K", 256, 144, zero_group=32)
Q5_K = _of_ggml("Q5_K", 256, 176, zero_group=32)
Q6_K = _of_ggml("Q6_K", 256, 210)
