"""What was tried out is kept for what computed it."""

from __future__ import annotations

import pytest
import torch
from checkpoints import in_dtype

from backends.feedforward import linear
from backends.ggml.library import is_installed
from backends.hf import self_test
from backends.hf.model import load_hf_model
from backends.hf.self_test import Product, find_exactness, least_rows_of_product


@pytest.mark.usefixtures("_torch_threads")
@pytest.mark.skipif(not is_installed(), reason="needs llama-cpp-python")
def test_other_threads_and_another_library_are_tried_out(
    checkpoint_factory, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = load_hf_model(in_dtype(checkpoint_factory("llama"), tmp_path, torch.bfloat16))
    for by_ggml, n_threads, n_kept in ((True, 1, 1), (True, 2, 2), (True, 1, 2), (False, 1, 3)):
        monkeypatch.setattr(linear, "torch_is_slow", lambda dtype, slow=by_ggml: slow)
        torch.set_num_threads(n_threads)
        find_exactness(model)
        assert len(list((tmp_path / "cache" / "specdec").glob("exact-*"))) == n_kept


@pytest.mark.parametrize("has_bias", [False, True])
def test_another_order_of_one_row_is_found_behind_rounded_sums(monkeypatch, has_bias) -> None:
    """As torch multiplies bf16 on AVX-512 from 1536 terms on: one row by a kernel of its own."""

    def linear(x, weight, bias):
        x, weight, n_half = x.float(), weight.float(), weight.shape[1] // 2
        if x.shape[-2] == 1:
            sums = x[..., :n_half] @ weight[:, :n_half].T + x[..., n_half:] @ weight[:, n_half:].T
        else:  # one row after the other, so that they are alike
            sums = torch.stack([row @ weight.T for row in x[0].split(1)])[None, :, 0]
        return (sums if bias is None else sums + bias).bfloat16()

    monkeypatch.setattr(self_test, "tried_linear_of", lambda dtype: linear)
    product = Product(2048, 128, has_bias, False)
    assert least_rows_of_product(product, torch.bfloat16) == 2
