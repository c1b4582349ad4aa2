"""What was tried out is kept for what computed it."""

from __future__ import annotations

import pytest
import torch
from checkpoints import in_dtype

from backends.feedforward import linear
from backends.ggml.library import is_installed
from backends.hf.model import load_hf_model
from backends.hf.self_test import find_exactness


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
