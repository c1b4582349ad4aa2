"""The torch backend: a transformers model whose decoder layers are streamed as they are needed.

A `TorchWeights` decides where the weights come from and on which device they are: one reads them
into the memory of the CPU, the other copies them to a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import torch

from backends.attention.batch import BLOCK_SIZE
from backends.contract.backend import BackendError, KvUsage, TransferStats
from backends.contract.recovery import RecoveringBackend
from backends.contract.sequence import SavedTensors, SequenceInput
from backends.contract.store import NewTokens, PassOutput
from backends.hf.cache import ModelCache
from backends.hf.cpu_weights import CpuWeights
from backends.hf.loading import load_hf_model
from backends.hf.model import HfModel
from backends.hf.runner import ModelRunner
from backends.hf.self_test import TorchExactness
from backends.hf.threads import threads_of_pass
from backends.hf.weights import TorchWeights
from backends.kv.layer import PoolLayer
from backends.kv.sequence import BlockStore
from backends.kv.tier_sizes import Tiers
from offload.formats.mapped import TensorShape

_DEFAULT_MAX_NODES = 8192
"""KV capacity for live nodes if the caller gives no limit."""
_ANY = TorchExactness(False)
_T = TypeVar("_T")


class TorchBackend(RecoveringBackend[BlockStore]):
    """A Hugging Face checkpoint, computed on the device of `weights`, which is closed with it.

    num_kv_slots: KV slots for the tokens and nodes of all sequences; None: enough for one.
    exactness: the conditions under which a pass is exact (see `Exactness`).
    n_threads: threads of a pass; None: as torch is set.
    follows_load: whether passes use fewer threads while other programs compute.
    tiers: sizes of a KV cache that is partly in a file; None: all of it is in memory.
    """

    _computes_scores = True

    def __init__(
        self,
        model: HfModel,
        weights: TorchWeights,
        *,
        max_context: int | None = None,
        max_nodes: int | None = None,
        num_kv_slots: int | None = None,
        exactness: TorchExactness = _ANY,
        n_threads: int | None = None,
        follows_load: bool = False,
        tiers: Tiers | None = None,
    ) -> None:
        super().__init__()
        self._model, self._weights = model, weights
        self._n_threads, self._follows_load = n_threads, follows_load
        self.max_nodes = max_nodes
        self.vocab_size = model.vocab_size
        self.max_context = min(max_context or model.max_context, model.max_context)
        with ExitStack() as opened:
            opened.callback(weights.close)
            self._cache = self._make_cache(num_kv_slots, exactness.min_batch_tokens, tiers)
            self._pool = self._cache.pool
            opened.callback(self._pool.close)
            self._runner = ModelRunner(model, weights, self._cache, exactness, max_nodes)
            opened.pop_all()

    @classmethod
    def resident(
        cls, directory: Path, *, max_context: int | None = None, exactness: TorchExactness = _ANY
    ) -> TorchBackend:
        """Load a whole checkpoint into the memory of the CPU."""
        model = load_hf_model(directory)
        return cls.kept_in_memory(model, max_context=max_context, exactness=exactness)

    @classmethod
    def kept_in_memory(
        cls,
        model: HfModel,
        *,
        max_context: int | None = None,
        max_nodes: int | None = None,
        num_kv_slots: int | None = None,
        exactness: TorchExactness = _ANY,
    ) -> TorchBackend:
        """Create a backend on the CPU that streams nothing."""
        layers = [
            layer.with_resident(frozenset(t.name for t in layer.tensors))
            for layer in model.layer_weights
        ]
        weights = CpuWeights(model, layers, 0)
        return cls(
            model,
            weights,
            max_context=max_context,
            max_nodes=max_nodes,
            num_kv_slots=num_kv_slots,
            exactness=exactness,
        )

    def _make_cache(
        self, num_kv_slots: int | None, min_batch_tokens: int, tiers: Tiers | None
    ) -> ModelCache:
        limit = _DEFAULT_MAX_NODES if self.max_nodes is None else self.max_nodes
        return ModelCache(
            self._model,
            self._weights.device,
            self.max_context + limit if num_kv_slots is None else num_kv_slots,
            max_nodes=self.max_nodes,
            min_batch_tokens=min_batch_tokens,
            tiers=tiers,
        )

    @property
    def limits_sequences(self) -> bool:
        return bool(self._model.recurrences)

    @property
    def transfer_stats(self) -> TransferStats:
        use, (n_read, n_written) = self._weights.use, self._pool.traffic
        return use._replace(
            stall_seconds=use.stall_seconds + self._pool.stall_seconds,
            kv_bytes_read=n_read,
            kv_bytes_written=n_written,
        )

    @property
    def kv_bytes(self) -> int:
        return self._pool.n_bytes

    @property
    def cold_kv_bytes(self) -> int:
        return self._pool.cold_bytes

    @property
    def state_bytes(self) -> int:
        return self._cache.state_bytes(self._stores)

    @property
    def _stores(self) -> list[BlockStore]:
        return [sequence.store for sequence in tuple(self._sequences)]

    def kv_growth_bytes(self, n_tokens: int, num_new_seqs: int = 0) -> int:
        return self._cache.growth_bytes(self._stores, n_tokens, num_new_seqs)

    @property
    def unused_kv_bytes(self) -> int:
        return self._cache.unused_bytes

    def release_unused_kv(self) -> None:
        self._cache.release_unused()

    @property
    def n_kv_allocated(self) -> int:
        return self._pool.n_touched * BLOCK_SIZE

    @property
    def kv_usage(self) -> KvUsage:
        return self._cache.usage

    @property
    def unread_bytes(self) -> int:
        return self._weights.unread_bytes

    @property
    def pinned_bytes(self) -> int:
        return self._weights.pinned_bytes

    def set_pinned_bytes(self, n_bytes: int) -> None:
        self._weights.set_pinned_bytes(n_bytes)

    def collect_hidden_states(self, layers: Sequence[int]) -> None:
        self._runner.hidden_state_layers = tuple(layers)

    def cached_states(self, layers: Mapping[str, int]) -> dict[str, PoolLayer]:
        """Return keys and values that these layers have cached of all sequences, for a draft head
        that attends to them. A pass of the head finds its sequence's rows by its blocks, from
        `SequenceInput.context`; it must not run during a pass of this backend."""
        if self._pool.n_hot is not None:
            raise BackendError("a head cannot attend to a KV cache that is partly in a file")
        return {name: self._pool.layers[layer] for name, layer in layers.items()}

    def request_cancel(self) -> None:
        """End a running pass with a BackendError at its next layer or chunk, or while it waits for
        storage. Thread-safe."""
        self._runner.is_cancelled = True

    def close(self) -> None:
        self._is_closed = True
        self._weights.stop()
        self._runner.detach()
        for sequence in self._sequences:
            sequence.store.close()
        self._pool.close()
        self._weights.close()

    def _guarded(self, operation: Callable[[], _T], recover: Callable[[], None]) -> _T:
        """See RecoveringBackend; runs in the context of the weights' device."""

        def on_device() -> _T:
            with self._weights.computing(), torch.inference_mode():
                return operation()

        return super()._guarded(on_device, recover)

    # --- sequences --------------------------------------------------------------------------

    def _new_kv(self) -> BlockStore:
        return self._cache.new_store()

    def _fork(self, kv: BlockStore, length: int) -> BlockStore:
        return kv.fork(length)

    def _num_free_slots(self, kv: BlockStore) -> int:
        return min(self._cache.num_free_slots(kv), self.max_context)

    def _capacity_of(self, kv: BlockStore, rows: SequenceInput) -> Sequence[int]:
        return self._cache.capacity_of(kv, rows)

    def _free_units(self) -> Sequence[int]:
        return self._cache.free_units

    def _restart(self) -> None:
        self._pool.abandon()
        self._weights.restart()

    def _prefix_tensors(self, kv: BlockStore) -> tuple[TensorShape, ...]:
        return self._cache.prefix_tensors(kv)

    def _save_prefix(self, kv: BlockStore, buffers: Mapping[str, memoryview]) -> None:
        self._cache.save_prefix(kv, buffers)

    def _finish(self, kv: BlockStore) -> None:
        if kv.recurrent is not None:
            kv.recurrent.rest()

    def _load_prefix(self, kv: BlockStore, token_ids: list[int], tensors: SavedTensors) -> None:
        self._cache.load_prefix(kv, token_ids, tensors)

    def _compute(self, new: Sequence[NewTokens[BlockStore]]) -> list[PassOutput]:
        self._runner.is_cancelled = False
        with threads_of_pass(self._n_threads, self._follows_load):
            return self._runner.run(new, self._stores)
