"""Twelve-bit packing restores all sixteen bits, and refuses invalid data."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_tensors import decoded, packed, weights_of

from backends.packed import by_numpy
from backends.packed.by_numpy import BLOCK
from backends.packed.kernels import has_numba
from backends.packed.tensor import PackedTensor
from backends.packed.twelve_bits import (
    HEADER_BYTES,
    MAX_BASE,
    Planes,
    TwelveBits,
    choose_base,
)
from offload.formats.tensors import TensorRecord

if has_numba():
    from backends.packed import by_numba
    from backends.tiles import compiling

    KERNELS: tuple[ModuleType, ...] = (by_numpy, by_numba)
else:
    KERNELS = (by_numpy,)

each_kernel = pytest.mark.parametrize("kernels", KERNELS, ids=lambda k: k.__name__[17:])
SIZES = st.one_of(st.integers(1, 40), st.integers(BLOCK - 2, BLOCK + 2), st.integers(1, 3000))


@each_kernel
@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**32 - 1),
    SIZES,
    st.lists(st.integers(0, 255), min_size=1, max_size=30),
    st.integers(0, MAX_BASE),
)
def test_bits_come_back(
    kernels: ModuleType, seed: int, n: int, exponents: list[int], base: int
) -> None:
    """NaN, infinity (exponent 255), zeros and denormals (0) are covered, with any base."""
    codec, weights = TwelveBits(kernels), weights_of(seed, n, exponents)
    stored = packed(codec, weights, base)
    np.testing.assert_array_equal(decoded(codec, stored, n), weights)
    for other in KERNELS:
        np.testing.assert_array_equal(packed(TwelveBits(other), weights, base), stored)


@each_kernel
def test_all_bit_patterns_come_back(kernels: ModuleType) -> None:
    codec, weights = TwelveBits(kernels), np.arange(2**16, dtype=np.uint16)
    for base in (0, 1, 112, MAX_BASE):
        stored = packed(codec, weights, base)
        n_exceptions = (256 - 16) * 256
        assert len(stored) == HEADER_BYTES + 2**16 * 3 // 2 + 8 * n_exceptions
        np.testing.assert_array_equal(decoded(codec, stored, 2**16), weights)


def test_parts_are_decoded_like_the_whole() -> None:
    codec, weights = TwelveBits(), weights_of(1, 5 * BLOCK + 77, [0, 3, 120, 121, 127, 255])
    decode = codec.opened(packed(codec, weights, 115), len(weights))
    for start, end in ((0, BLOCK), (BLOCK, 3 * BLOCK), (5 * BLOCK, 5 * BLOCK + 77)):
        out = np.zeros(2 * (end - start), np.uint8)
        decode(start, end, out)
        np.testing.assert_array_equal(out.view(np.uint16), weights[start:end])


def test_the_base_is_that_of_most_weights() -> None:
    usual = weights_of(2, 10_000, list(range(110, 125)))
    zeros = np.zeros(30_000, np.uint16)
    rare = weights_of(3, 20, [3, 250])
    base = choose_base(np.concatenate([usual, zeros, rare]))
    assert base == 109
    assert len(TwelveBits().encode(np.concatenate([usual, zeros]), base)[2]) == 0


def test_trained_weights_take_twelve_bits() -> None:
    values = np.random.default_rng(0).normal(0, 0.02, 2**20).astype(np.float32)
    weights = (values.view(np.uint32) >> 16).astype(np.uint16)
    n_bytes = len(packed(TwelveBits(), weights, choose_base(weights)))
    assert n_bytes < 0.755 * weights.nbytes


@pytest.mark.parametrize("change", [-8, -1, 1, 4, 8 * 21, 8 * 3000])
def test_sizes_that_cannot_be_are_refused(change: int) -> None:
    match = "2000 weights take 3136 bytes and 8 for each of at most 20 exceptions, not"
    with pytest.raises(ValueError, match=match):
        TwelveBits().check_size(2000, Planes(2000).exceptions + change)
    TwelveBits().check_size(2000, Planes(2000).n_bytes(20))


def test_memory_for_the_exceptions_is_counted() -> None:
    """Checking the exceptions takes memory while a tensor is opened."""
    n_weights = 1 << 20
    planes = Planes(n_weights)
    weights = np.zeros(n_weights, np.uint16)
    weights[:: n_weights // planes.max_exceptions + 1] = 0x7F80
    codec = TwelveBits(by_numpy)
    stored = packed(codec, weights, 110)
    record = TensorRecord("up", "BF16", (n_weights,), Path("m"), 0, len(stored), codec.name)
    counted = codec.scratch_bytes(PackedTensor(record))
    tracemalloc.start()
    try:
        codec.opened(stored, n_weights)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert planes.n_exceptions(len(stored)) > 10_000
    assert counted / 2 < peak < counted


def broken(change: str) -> np.ndarray:
    weights = np.full(2000, 0x3C00, np.uint16)
    weights[[10, 20]] = 0x7F80
    stored = packed(TwelveBits(), weights, 110)
    at = Planes(2000).exceptions
    first, second = ((10 << 8) | 255, (20 << 8) | 255)
    pairs = {
        "beyond": (first, (2000 << 8) | 255),
        "far": (first, (2**56 - 1 << 8) | 255),
        "twice": (first, first),
        "descending": (second, first),
    }
    if change in pairs:
        stored[at:] = np.frombuffer(struct.pack("<QQ", *pairs[change]), np.uint8)
    elif change in ("early", "late"):
        stored[1 if change == "early" else 63] = 1
    elif change == "base":
        stored[0] = MAX_BASE + 1
    elif change == "count":
        stored[8:16] = np.frombuffer(struct.pack("<Q", 2**64 - 1), np.uint8)
    elif change == "cut":
        stored = stored[: at - 1]
    return stored


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ("beyond", "an exception is weight 2000 of 2000"),
        ("far", "an exception is weight 72057594037927935 of 2000"),
        ("twice", "do not ascend"),
        ("descending", "do not ascend"),
        ("base", "its base is 241, at most 240"),
        ("early", "bytes of its header are not 0"),
        ("late", "bytes of its header are not 0"),
        ("count", "with 18446744073709551615 exceptions"),
        ("cut", "3135 bytes end before 3136"),
    ],
)
def test_hostile_bytes_are_refused(change: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        TwelveBits().opened(broken(change), 2000)


def test_an_exception_has_no_code() -> None:
    weights = np.full(2000, 0x3C00, np.uint16)
    weights[10] = 0x7F80
    stored = packed(TwelveBits(), weights, 110)
    stored[Planes(2000).codes + 10] |= 3
    decode = TwelveBits().opened(stored, 2000)
    with pytest.raises(ValueError, match="an exception has a code"):
        decode(0, 2000, np.zeros(4000, np.uint8))


@pytest.mark.skipif(not has_numba(), reason="needs numba")
def test_loops_are_compiled_where_they_cannot_be_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a user has no cache folder, and the installation belongs to root."""
    import numba

    compile_one = numba.njit

    def njit(signature: object, cache: bool = False, **options: object) -> object:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return compile_one(signature, **options)

    monkeypatch.setattr(numba, "njit", njit)
    anew = compiling.compiled(numba.int64(numba.int64))(lambda x: x + 1)
    assert anew(2) == 3
