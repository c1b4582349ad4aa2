"""Encoded weights decode to the input, as exactly as the format allows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.synth.formats import (
    BF16,
    F16,
    F32,
    IQ4_NL,
    IQ4_XS,
    Q4_0,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    WeightFormat,
)

gguf = pytest.importorskip("gguf")
pytest.importorskip("llama_cpp")
pytestmark = pytest.mark.gguf

# Largest error relative to the largest weight of a block: half a step, or a whole step if the
# largest weight of the other sign is clipped, plus the rounding of the scale.
ERRORS = {F32: 0.0, F16: 2**-11, BF16: 2**-8, Q8_0: 1 / 220, Q6_K: 1 / 25}
ERRORS |= {Q5_0: 1 / 14, Q5_1: 1 / 25, Q5_K: 1 / 14}
ERRORS |= {Q4_0: 1 / 7, Q4_K: 1 / 8, IQ4_NL: 1 / 7, IQ4_XS: 1 / 7}
TINY = 2**-25  # half of F16's smallest step
ALL = pytest.mark.parametrize("form", ERRORS, ids=lambda form: form.name)


def decode(form: WeightFormat, blocks: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[form.name]).astype(np.float32)


@ALL
def test_sizes_are_ggmls(form: WeightFormat) -> None:
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[form.name]]
    assert (form.block_size, form.block_bytes) == size
    assert form.n_bytes(512) == 512 // form.block_size * form.block_bytes


@ALL
@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32), scale=st.sampled_from([1e-2, 1.0, 30.0]))
def test_errors_are_at_most_a_step(form: WeightFormat, seed: int, scale: float) -> None:
    normal = np.random.default_rng(seed).standard_normal((7, form.block_size), np.float32)
    values = normal * np.float32(scale)
    coded = form.encode(values)
    assert (coded.shape, coded.dtype) == ((7, form.block_bytes), np.uint8)
    largest = np.abs(values).max(axis=1, keepdims=True)
    assert (np.abs(decode(form, coded) - values) <= ERRORS[form] * largest + TINY).all()


@ALL
def test_zeros_stay_zeros(form: WeightFormat) -> None:
    values = np.random.default_rng(0).standard_normal((5, form.block_size), np.float32)
    values[:, form.block_size // 3 // form.zero_group * form.zero_group :] = 0
    values[2] = 0
    assert not decode(form, form.encode(values))[values == 0].any()


def test_bf16_rounds_as_torch_does() -> None:
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(0).integers(0, 0x7F000000, 100_000, dtype=np.uint32)
    bits[:1000] = bits[:1000] & 0xFFFF0000 | 0x8000  # ties
    values = bits.view(np.float32).reshape(-1, 1)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
    assert (BF16.encode(values).view(np.int16) == expected).all()
