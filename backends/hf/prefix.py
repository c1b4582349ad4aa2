"""The KV of a committed prefix as tensors of a file: layers.<i>.keys and layers.<i>.values,
each [heads, tokens, width] as the cache stores them; beside them the states of recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from backends.attention.batch import runs_of
from backends.attention.stored_rows import RowFormat
from backends.checkpoint.config import KvHeads
from backends.checkpoint.records import TORCH_DTYPES
from backends.contract.backend import BackendError
from backends.contract.sequence import SavedTensors
from backends.hf.model import HfModel
from backends.kv.pool import KvPool
from backends.kv.sequence import BlockStore
from backends.recurrent.files import (
    STATES,
    load_states,
    refuse_other_states,
    save_states,
    state_tensors,
)
from offload.formats.mapped import TensorShape

_NAMES = {torch.uint8: "U8", **{dtype: name for name, dtype in TORCH_DTYPES.items()}}


def prefix_tensors(pool: KvPool, kv: BlockStore) -> tuple[TensorShape, ...]:
    n_tokens = kv.table.n_committed
    rows = (
        TensorShape(name, _NAMES[rows.dtype], (rows.shape[1], n_tokens, rows.shape[3]))
        for name, rows in _pools(pool, n_tokens)
    )
    return (*rows, *(state_tensors(kv.recurrent) if kv.recurrent is not None else ()))


def save_prefix(pool: KvPool, kv: BlockStore, buffers: Mapping[str, memoryview]) -> None:
    n_tokens = kv.table.n_committed
    pool.begin(np.empty(0, dtype=np.int64), [kv.places])
    runs = runs_of(kv.rows(0, n_tokens))
    for i, layer in enumerate(pool.layers if n_tokens else ()):
        if layer.keys is None or layer.values is None:
            continue  # it keeps no keys and values
        with pool.reading(i):
            for kind, rows in zip(("keys", "values"), layer.stored_rows, strict=True):
                shape = (rows.stored.shape[1], n_tokens, rows.stored.shape[3])
                buffer = buffers[f"layers.{i}.{kind}"]
                saved = torch.frombuffer(buffer, dtype=rows.stored.dtype).view(shape)
                for first, row, num_tokens in runs:
                    part = saved[:, first : first + num_tokens]
                    rows.read_stored(slice(row, row + num_tokens), part)
    pool.end()
    if kv.recurrent is not None:
        save_states(kv.recurrent, buffers)


def load_prefix(
    pool: KvPool,
    kv: BlockStore,
    model: HfModel,
    token_ids: list[int],
    tensors: SavedTensors,
    device: torch.device,
) -> None:
    """Fill an empty cache. Raises BackendError for tensors that are not the KV of this prefix."""
    with_kv = [i for i, n_values in enumerate(model.layer_kv_values) if n_values]
    names = {f"layers.{i}.{kind}" for i in with_kv for kind in ("keys", "values")}
    if {name for name in tensors if not name.startswith(STATES)} != names:
        raise BackendError(f"the saved KV has not the tensors of {len(pool.layers)} layers")
    kv.take_blocks(0, len(token_ids))
    pool.begin(kv.rows(0, len(token_ids)))
    for i in with_kv:
        keys, values = (
            _as_rows(*tensors[f"layers.{i}.{kind}"], _no_rows(model, heads, row_format), token_ids)
            for kind, heads, row_format in zip(
                ("keys", "values"), model.layer_kv_heads[i], model.kv_formats, strict=True
            )
        )
        dims = [heads.dim for heads in model.layer_kv_heads[i]]
        with pool.reading(i):
            pool.layers[i].write(keys.to(device), values.to(device), (dims[0], dims[1]))
    pool.end()
    if kv.recurrent is not None:
        kv.recurrent = load_states(len(token_ids), tensors, model.recurrences)
        saved = [name for name in tensors if name.startswith(STATES)]
        refuse_other_states(saved, kv.recurrent)
    kv.append(token_ids)


def _pools(pool: KvPool, n_tokens: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and KV rows of all layers; nothing for an empty prefix."""
    for i, layer in enumerate(pool.layers if n_tokens else ()):
        if layer.keys is None or layer.values is None:
            continue  # it keeps no keys and values
        yield f"layers.{i}.keys", layer.keys
        yield f"layers.{i}.values", layer.values


def _no_rows(model: HfModel, heads: KvHeads, row_format: RowFormat) -> torch.Tensor:
    """Return no rows [1, heads, 0, width] of a layer's keys or values, as the cache stores them."""
    return row_format.encode(torch.empty(1, heads.n_heads, 0, heads.dim, dtype=model.dtype))


def _as_rows(
    tensor: TensorShape, buffer: memoryview, no_rows: torch.Tensor, token_ids: list[int]
) -> torch.Tensor:
    """Return a view [1, heads, tokens, width] of the saved bytes."""
    dtype, shape = no_rows.dtype, (no_rows.shape[1], len(token_ids), no_rows.shape[3])
    if tensor.dtype != _NAMES[dtype] or tuple(tensor.shape) != shape:
        raise BackendError(
            f"the saved {tensor.name} is {tensor.dtype} {list(tensor.shape)}, must be "
            f"{_NAMES[dtype]} {list(shape)}"
        )
    raw = torch.frombuffer(buffer, dtype=torch.uint8) if len(buffer) else torch.empty(0)
    if raw.data_ptr() % dtype.itemsize:
        raise BackendError(f"the saved {tensor.name} is not aligned")
    return raw.view(dtype).view(shape)[None]
