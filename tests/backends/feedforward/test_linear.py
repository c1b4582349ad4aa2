"""Linear layers by ggml's kernels where torch has no fast ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("llama_cpp")

from backends.feedforward import linear as linear_file
from backends.feedforward.linear import (
    _by_ggml,
    library_of,
    linear_of,
    slow_products,
    use_fast_products,
)
from backends.ggml.library import is_installed
from backends.hf.products import Product
from backends.hf.self_test import min_batch_tokens_of_product

CLOSE = torch.contiguous_format
HALF = [torch.bfloat16, torch.float16]


@given(
    num_rows=st.integers(1, 40),
    n_in=st.sampled_from([1, 3, 8, 40, 64, 100]),
    n_out=st.sampled_from([1, 5, 16, 33, 128]),
    dtype=st.sampled_from(HALF),
    has_bias=st.booleans(),
    shift=st.integers(0, 9),
)
def test_products_are_those_of_float64(
    num_rows: int, n_in: int, n_out: int, dtype: torch.dtype, has_bias: bool, shift: int
) -> None:
    torch.manual_seed(num_rows)
    # Weights lie anywhere in a file, at a multiple of their own size.
    weight = torch.randn(shift + n_out * n_in).to(dtype)[shift:].view(n_out, n_in)
    x = torch.randn(2, num_rows, n_in).to(dtype)
    bias = torch.randn(n_out).to(dtype) if has_bias else None
    actual = _by_ggml(x, weight, bias)
    assert actual.dtype == dtype
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    step = torch.finfo(dtype).eps
    assert torch.allclose(actual.double(), expected, rtol=step, atol=8 * step)


def test_sums_fit_their_buffer_whatever_torchs_default_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building a model in another thread changes the default for a moment; ggml writes floats."""

    class Products:
        def multiply(self, *_: Any) -> None:
            """Multiply without writing: the output buffer may be too small."""

    monkeypatch.setattr(linear_file, "_products", Products)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        sums = linear_file._sums_of_ggml(
            torch.ones(2, 8).bfloat16(), torch.ones(4, 8).bfloat16(), None, 1
        )
    finally:
        torch.set_default_dtype(before)
    assert sums.dtype == torch.float32


def test_rows_that_lie_apart_are_gathered() -> None:
    weight = torch.randn(16, 8).bfloat16()
    x = torch.randn(5, 24).bfloat16()[:, 8:16]
    assert torch.equal(_by_ggml(x, weight), _by_ggml(x.contiguous(), weight))


@pytest.mark.parametrize("part", [lambda w: w[:16, :64].T, lambda w: w[::2, :16]])
def test_a_matrix_may_be_a_part_of_another_one(part: Callable) -> None:
    weight = part(torch.randn(64, 80).bfloat16())
    x = torch.randn(5, 16).bfloat16()
    assert torch.equal(_by_ggml(x, weight), _by_ggml(x, weight.clone(memory_format=CLOSE)))


def test_no_row_gives_no_row() -> None:
    assert _by_ggml(torch.empty(1, 0, 8).half(), torch.randn(4, 8).half()).shape == (1, 0, 4)


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(4, 8, dtype=torch.float16),
        torch.zeros(4, 16, dtype=torch.bfloat16),
        torch.empty(4, 8, dtype=torch.bfloat16, device="meta"),
    ],
    ids=["of another format", "of another width", "whose layer is not in memory"],
)
def test_what_torch_would_refuse_is_refused(weight: torch.Tensor) -> None:
    """Otherwise wrong numbers are multiplied, or the process ends."""
    with pytest.raises(RuntimeError, match="do not fit a matrix"):
        _by_ggml(torch.zeros(3, 8).bfloat16(), weight)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("n_in", [64, 100])
def test_a_row_has_the_same_bits_in_every_pass_of_enough_rows(
    dtype: torch.dtype, n_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_file, "torch_is_slow", HALF.__contains__)
    minimum = min_batch_tokens_of_product(Product(n_in, 128, True, False), dtype)
    assert minimum is not None  # their number depends on the processor


def test_trials_take_any_number_of_threads_that_a_pass_may(monkeypatch) -> None:
    taken, right = set(), linear_file._sums_of_ggml

    def sums(*inputs: Any) -> torch.Tensor:
        taken.add(inputs[-1])
        return right(*inputs)

    monkeypatch.setattr(linear_file, "torch_is_slow", HALF.__contains__)
    monkeypatch.setattr(linear_file, "_sums_of_ggml", sums)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    min_batch_tokens_of_product(Product(64, 16, False, False), torch.bfloat16)
    assert taken == {1, 3}


def test_two_threads_multiply_at_the_same_time() -> None:
    weight = torch.randn(300, 256).bfloat16()
    inputs = [torch.randn(9, 256).bfloat16() for _ in range(2)]
    expected = [_by_ggml(x, weight) for x in inputs]
    n_wrong = [0, 0]

    def multiply(which: int) -> None:
        for _ in range(200):
            n_wrong[which] += not torch.equal(_by_ggml(inputs[which], weight), expected[which])

    threads = [threading.Thread(target=multiply, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert n_wrong == [0, 0]


def test_what_computes_is_a_matter_of_processor_and_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert linear_of(torch.float32) is nn.functional.linear
    monkeypatch.setattr(linear_file, "torch_is_slow", HALF.__contains__)
    assert is_installed()
    assert linear_of(torch.bfloat16) is _by_ggml
    assert library_of(torch.bfloat16).startswith("llama-cpp-python ")
    monkeypatch.setattr(linear_file, "is_installed", lambda: False)
    assert linear_of(torch.bfloat16) is nn.functional.linear
    assert library_of(torch.bfloat16) == f"torch {torch.__version__}"
    (said,) = slow_products(torch.bfloat16)
    assert "pip install 'specdec-stream[gguf]'" in said


def test_modules_compute_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4, bias=False)).bfloat16()
    x = torch.randn(3, 8).bfloat16()
    first, second = model
    expected = _by_ggml(_by_ggml(x, first.weight, first.bias), second.weight)
    monkeypatch.setattr(linear_file, "torch_is_slow", HALF.__contains__)
    with torch.inference_mode():
        use_fast_products(model, torch.bfloat16)
        assert torch.equal(model(x), expected)
        # A family's float32 products stay with torch.
        assert model.float()(x.float()).dtype == torch.float32
