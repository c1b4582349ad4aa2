"""A KV cache that grows takes at no moment more than was set aside for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_pair import save_model
from torch_memory import peak_bytes

from backends.contract.source import BackendOptions
from backends.hf.cache import BLOCK_ROWS, TreeCache
from backends.hf.source import HfSource


@pytest.mark.parametrize("n_rows_each", [1, 5, BLOCK_ROWS])
@pytest.mark.parametrize("n_blocks", [1, 2, 3])
def test_growing(tmp_path: Path, n_rows_each: int, n_blocks: int) -> None:
    source = HfSource(save_model(tmp_path, seed=0), BackendOptions())
    config = source.model.config
    cache = TreeCache(len(source.layers))
    shape = (1, config.num_key_value_heads, n_rows_each, config.head_dim)
    keys, values = (torch.zeros(shape, dtype=source.model.dtype) for _ in range(2))

    def fill() -> None:
        for _ in range(n_blocks * BLOCK_ROWS // n_rows_each):
            for layer in cache.layers:
                layer.update(keys, values)

    n_rows = n_blocks * BLOCK_ROWS
    counted = source.kv_bytes(n_rows - source.exactness.n_least_rows, 0)
    assert peak_bytes(fill) <= counted
    assert counted <= (1 + 1 / len(source.layers)) * n_rows * source.model.kv_bytes_per_token
