"""The KV of a committed prefix as tensors of a file: layers.<i>.keys and layers.<i>.values,
each [heads, tokens, dim] in the model's dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from backends.contract.backend import BackendError, SavedTensors
from backends.hf.cache import TreeCache
from backends.hf.config import kv_values_per_token
from backends.hf.model import TORCH_DTYPES, HfModel
from offload.formats.mapped import TensorShape

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def prefix_tensors(cache: TreeCache) -> tuple[TensorShape, ...]:
    return tuple(
        TensorShape(name, _NAMES[rows.dtype], tuple(rows.shape)) for name, rows in _rows(cache)
    )


def save_prefix(cache: TreeCache, buffers: Mapping[str, memoryview]) -> None:
    for name, rows in _rows(cache):
        torch.frombuffer(buffers[name], dtype=rows.dtype).view(rows.shape).copy_(rows)


def load_prefix(
    cache: TreeCache,
    model: HfModel,
    token_ids: list[int],
    tensors: SavedTensors,
    device: torch.device,
) -> None:
    """Fill an empty cache. Raises BackendError for tensors that are not such a prefix's."""
    names = {f"layers.{i}.{kind}" for i in range(len(cache.layers)) for kind in ("keys", "values")}
    if set(tensors) != names:
        raise BackendError(f"the saved KV has not the tensors of {len(cache.layers)} layers")
    for i, (layer, module) in enumerate(zip(cache.layers, model.layers, strict=True)):
        keys, values = (
            _as_rows(*tensors[f"layers.{i}.{kind}"], len(token_ids), model.dtype)
            for kind in ("keys", "values")
        )
        width = sum(rows.shape[1] * rows.shape[3] for rows in (keys, values))
        if width != kv_values_per_token(model.config, module):
            raise BackendError(f"the saved KV of layer {i} has {width} numbers for a token")
        layer.restore(keys.to(device), values.to(device))
    cache.append(token_ids)


def _rows(cache: TreeCache) -> Iterator[tuple[str, torch.Tensor]]:
    """Views [heads, tokens, dim] of the committed rows."""
    n_tokens = cache.table.n_committed
    for i, layer in enumerate(cache.layers if n_tokens else ()):
        assert layer.keys is not None
        assert layer.values is not None
        yield f"layers.{i}.keys", layer.keys[0, :, :n_tokens]
        yield f"layers.{i}.values", layer.values[0, :, :n_tokens]


def _as_rows(
    tensor: TensorShape, buffer: memoryview, n_tokens: int, dtype: torch.dtype
) -> torch.Tensor:
    """A view [1, heads, tokens, dim] of the saved bytes."""
    raw = torch.frombuffer(buffer, dtype=torch.uint8) if len(buffer) else torch.empty(0)
    is_right = tensor.dtype == _NAMES[dtype] and len(tensor.shape) == 3
    if not is_right or tensor.shape[1] != n_tokens or 0 in tensor.shape:
        raise BackendError(
            f"the saved {tensor.name} is {tensor.dtype} {list(tensor.shape)}, must be "
            f"{_NAMES[dtype]} [heads, {n_tokens}, numbers]"
        )
    if raw.data_ptr() % dtype.itemsize:
        raise BackendError(f"the saved {tensor.name} is not aligned")
    return raw.view(dtype).view(tensor.shape)[None]
