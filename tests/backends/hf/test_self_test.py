"""Self-test results are cached for the code that produced them."""

from __future__ import annotations

import pytest
import torch
from checkpoints import in_dtype

from backends.feedforward import linear
from backends.ggml.library import is_installed
from backends.hf import self_test
from backends.hf.loading import load_hf_model
from backends.hf.products import Product, products_of
from backends.hf.self_test import find_exactness, min_batch_tokens_of_product


@pytest.mark.slow
@pytest.mark.skipif(not is_installed(), reason="needs llama-cpp-python")
def test_other_threads_and_another_library_are_tried_out(
    checkpoint_factory, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = load_hf_model(in_dtype(checkpoint_factory("llama"), tmp_path, torch.bfloat16))
    for by_ggml, n_threads, num_retained in (
        (True, 1, 1),
        (True, 2, 2),
        (True, 1, 2),
        (False, 1, 3),
    ):
        monkeypatch.setattr(linear, "torch_is_slow", lambda dtype, slow=by_ggml: slow)
        find_exactness(model, n_threads)
        assert len(list((tmp_path / "cache" / "specdec").glob("exact-*"))) == num_retained


@pytest.mark.parametrize("has_bias", [False, True])
def test_another_order_of_one_row_is_found_behind_rounded_sums(monkeypatch, has_bias) -> None:
    """AVX-512 torch multiplies bf16 from 1536 terms on this way: one row has its own kernel."""

    def linear(x, weight, bias):
        x, weight, n_half = x.float(), weight.float(), weight.shape[1] // 2
        if x.shape[-2] == 1:
            sums = x[..., :n_half] @ weight[:, :n_half].T + x[..., n_half:] @ weight[:, n_half:].T
        else:  # one row repeated, so that all are alike
            sums = torch.stack([row @ weight.T for row in x[0].split(1)])[None, :, 0]
        return (sums if bias is None else sums + bias).bfloat16()

    monkeypatch.setattr(self_test, "tried_linear_of", lambda dtype: linear)
    product = Product(2048, 128, has_bias, False)
    assert min_batch_tokens_of_product(product, torch.bfloat16) == 2


def test_sums_of_few_terms_are_tried_in_many_rows(monkeypatch) -> None:
    """Most such sums are equal in any order: torch's bf16 sums of 24 to 40 terms on AVX-512."""

    def linear(x, weight, bias):
        ones = x.new_ones(*x.shape[:-1], len(weight))
        return torch.where((x[..., :1] > 0.9) & (x.shape[-2] <= 2), 2 * ones, ones)

    monkeypatch.setattr(self_test, "tried_linear_of", lambda dtype: linear)
    assert min_batch_tokens_of_product(Product(24, 64, False, False), torch.bfloat16) == 4


@pytest.mark.parametrize(("n_bad", "actual"), [(16, 32), (32, 64), (64, None)])
def test_no_number_of_rows_is_left_out_up_to_the_maximum(n_bad, actual, monkeypatch) -> None:
    """torch switches kernels at 4 096 multiplications: 32 rows of 32 terms and 4 outputs."""

    def linear(x, weight, bias):
        ones = x.new_ones(*x.shape[:-1], len(weight))
        return ones if x.shape[-2] > n_bad else 2 * ones

    monkeypatch.setattr(self_test, "tried_linear_of", lambda dtype: linear)
    assert min_batch_tokens_of_product(Product(32, 4, False, False), torch.bfloat16) == actual


def test_products_beside_the_layers_are_tried(checkpoint_factory) -> None:
    """OPT of 350 M has narrower embeddings than layers."""
    model = load_hf_model(checkpoint_factory("opt", word_embed_proj_dim=16))
    actual = {(item.n_in, item.n_out) for item in products_of(model)}
    assert {(16, 32), (32, 16)} <= actual
