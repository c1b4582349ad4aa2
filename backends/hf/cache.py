"""ModelCache: keys, values and recurrent states of all sequences of a transformers model.

A file keeps those of a committed prefix as tensors layers.<i>.keys and layers.<i>.values, each
[heads, tokens, width] as the cache stores them, beside the states of recurrent layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from backends.attention.batch import BLOCK_SIZE, runs_of
from backends.attention.stored_rows import RowFormat
from backends.checkpoint.config import KvHeads
from backends.checkpoint.records import TORCH_DTYPES
from backends.contract.backend import BackendError, KvUsage
from backends.contract.sequence import SavedTensors, SequenceInput
from backends.hf.model import HfModel
from backends.kv.pool import KvPool, blocks_of
from backends.kv.sequence import BlockStore, new_blocks
from backends.kv.tier_sizes import Tiers
from backends.kv.tiers import TieredPool
from backends.recurrent.files import (
    STATES,
    load_states,
    refuse_other_states,
    save_states,
    state_tensors,
)
from backends.recurrent.memory import StateMemory, kept_bytes
from backends.recurrent.passes import RecurrentPass
from backends.recurrent.states import RecurrentStates
from offload.formats.mapped import TensorShape
from offload.formats.tensors import CheckpointError

_NAMES = {torch.uint8: "U8", **{dtype: name for name, dtype in TORCH_DTYPES.items()}}
_END_BLOCKS = 2
"""Hot blocks that the end of a prompt may take."""


class ModelCache:
    """Keys, values and recurrent states of all sequences of a model.

    Memory is counted, and given back when it is unused, on a CPU alone: on a GPU all of it is
    allocated with the first row.

    Args:
        num_kv_slots: KV slots for the tokens and nodes of all sequences.
        max_nodes: maximum live nodes of all sequences; None: no limit.
        min_batch_tokens: tokens that a pass is padded to.
        tiers: sizes of a KV cache that is partly in a file; None: all of it is in memory.
    """

    def __init__(
        self,
        model: HfModel,
        device: torch.device,
        num_kv_slots: int,
        *,
        max_nodes: int | None = None,
        min_batch_tokens: int = 0,
        tiers: Tiers | None = None,
    ) -> None:
        self._model, self._device = model, device
        self._max_nodes, self._min_batch_tokens = max_nodes or 0, min_batch_tokens
        self._states = StateMemory(
            model.state_bytes, model.fed_bytes_per_token, model.largest_state_bytes
        )
        n_blocks = blocks_of(num_kv_slots + min_batch_tokens)
        self.pool: KvPool
        if tiers is None:
            without_kv = [i for i, n in enumerate(model.layer_kv_values) if not n]
            self.pool = KvPool(len(model.layers), n_blocks, without_kv, model.kv_formats)
        else:
            token_bytes = list(map(sum, model.stored_kv_bytes))
            self.pool = TieredPool(n_blocks, token_bytes, tiers, model.kv_formats)

    def new_store(self) -> BlockStore:
        return BlockStore(self.pool, RecurrentStates() if self._model.recurrences else None)

    def end_pass(self, stores: Sequence[BlockStore], recurrent: RecurrentPass | None) -> None:
        """Let a pass's states replace older ones; `stores` are those of all sequences."""
        if recurrent is not None:
            self._states.succeed([kv.recurrent for kv in stores], recurrent)

    # --- memory -----------------------------------------------------------------------------

    @property
    def _is_counted(self) -> bool:
        return self._device.type == "cpu"

    @property
    def unused_bytes(self) -> int:
        return self.pool.unused_bytes if self._is_counted else 0

    def release_unused(self) -> None:
        if self._is_counted:
            self.pool.release_unused()

    def growth_bytes(self, stores: Sequence[BlockStore], n_tokens: int, num_new_seqs: int) -> int:
        """Return the maximum bytes of states and of blocks not used before that a pass takes.

        n_tokens: tokens of all sequences after the pass.
        """
        if not self._is_counted:
            return 0
        n_new = new_blocks(
            stores, n_tokens + self._max_nodes + self._min_batch_tokens, num_new_seqs
        )
        block_bytes = BLOCK_SIZE * self._model.kv_bytes_per_token
        states = self._states.growth_bytes(
            [kv.recurrent for kv in stores], self._max_nodes, num_new_seqs
        )
        return self.pool.growth_bytes(n_new, block_bytes) + states

    @staticmethod
    def state_bytes(stores: Sequence[BlockStore]) -> int:
        return kept_bytes(kv.recurrent for kv in stores)

    @property
    def usage(self) -> KvUsage:
        pool = self.pool
        return KvUsage(BLOCK_SIZE * (pool.n_blocks - pool.n_free), BLOCK_SIZE * pool.n_shared)

    # --- capacity; a unit is a block, of which a cache with a file has hot ones --------------

    def num_free_slots(self, kv: BlockStore) -> int:
        return kv.num_free_slots - self._min_batch_tokens

    def capacity_of(self, kv: BlockStore, rows: SequenceInput) -> Sequence[int]:
        n_tokens = len(rows.token_ids)
        n_blocks = kv.n_blocks_for(n_tokens)
        if self.pool.n_hot is None:
            return (n_blocks,)
        # A prompt's tokens may go to cold blocks, but for those that its next step changes.
        return n_blocks, _END_BLOCKS if rows.parents is None else kv.n_end_blocks(n_tokens)

    @property
    def free_units(self) -> Sequence[int]:
        n_more = blocks_of(self._min_batch_tokens)
        n_free, n_hot = self.pool.n_free - n_more, self.pool.n_hot
        return (n_free,) if n_hot is None else (n_free, n_hot - n_more)

    # --- files of prefixes ------------------------------------------------------------------

    def prefix_tensors(self, kv: BlockStore) -> tuple[TensorShape, ...]:
        n_tokens = kv.table.n_committed
        rows = (
            TensorShape(name, _NAMES[rows.dtype], (rows.shape[1], n_tokens, rows.shape[3]))
            for name, rows in _pools(self.pool, n_tokens)
        )
        return (*rows, *(state_tensors(kv.recurrent) if kv.recurrent is not None else ()))

    def save_prefix(self, kv: BlockStore, buffers: Mapping[str, memoryview]) -> None:
        pool, n_tokens = self.pool, kv.table.n_committed
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

    def load_prefix(self, kv: BlockStore, token_ids: list[int], tensors: SavedTensors) -> None:
        """Fill an empty store.

        Raises BackendError for tensors that are not the KV of this prefix.
        """
        self.pool.free_if_unused()
        try:
            self._load(kv, token_ids, tensors)
        except (BackendError, CheckpointError):
            kv.abort(0)
            self.pool.free_if_unused()  # with the shapes that it took from the file
            raise

    def _load(self, kv: BlockStore, token_ids: list[int], tensors: SavedTensors) -> None:
        pool, model = self.pool, self._model
        with_kv = [i for i, n_values in enumerate(model.layer_kv_values) if n_values]
        names = {f"layers.{i}.{kind}" for i in with_kv for kind in ("keys", "values")}
        if {name for name in tensors if not name.startswith(STATES)} != names:
            raise BackendError(f"the saved KV has not the tensors of {len(pool.layers)} layers")
        kv.take_blocks(0, len(token_ids))
        pool.begin(kv.rows(0, len(token_ids)))
        for i in with_kv:
            keys, values = (
                _as_rows(*tensors[f"layers.{i}.{kind}"], _no_rows(model, heads, rows), token_ids)
                for kind, heads, rows in zip(
                    ("keys", "values"), model.layer_kv_heads[i], model.kv_formats, strict=True
                )
            )
            key_heads, value_heads = model.layer_kv_heads[i]
            dims = key_heads.dim, value_heads.dim
            with pool.reading(i):
                pool.layers[i].write(keys.to(self._device), values.to(self._device), dims)
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
