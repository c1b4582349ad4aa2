"""A KV cache that grows takes at no moment more than was set aside for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_pair import save_model
from torch_memory import peak_bytes

from backends.contract.source import BackendOptions
from backends.hf.backend import TorchBackend
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


@pytest.mark.parametrize("n_blocks", [1, 6])
def test_the_growth_to_come(tmp_path: Path, n_blocks: int) -> None:
    """Of a whole text, by a draft that rested, and then of one row more."""
    with TorchBackend.resident(save_model(tmp_path, seed=0)) as backend:
        cache, config = backend._cache, backend._model.config
        n_tokens = n_blocks * BLOCK_ROWS
        shape = (1, config.num_key_value_heads, n_tokens, config.head_dim)
        states = torch.zeros(shape, dtype=backend._model.dtype)
        counted: list[int] = []

        def fill(n_rows: int) -> None:
            counted.append(cache.n_bytes + backend.kv_growth_bytes(n_tokens))
            for layer in cache.layers:
                layer.update(states[:, :, :n_rows], states[:, :, :n_rows])

        assert peak_bytes(lambda: fill(n_tokens)) <= counted[0]
        backend._cache.free()
        assert peak_bytes(lambda: (fill(n_tokens), fill(1))) <= counted[-1]
