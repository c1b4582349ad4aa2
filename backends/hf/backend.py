"""The torch backend: a transformers model whose decoder layers arrive as they are needed.

A forward runs the model's own code. Each decoder layer is wrapped by a `LayerRunner`, which
waits for its weights, binds them as zero-copy views of a ring slot and lets go afterwards.
Embeddings, final norm and head stay where they are.

Where the weights come from, and on which device all this happens, is the business of a
`TorchWeights`: one that reads them into the memory of the CPU, or one that copies them to a GPU.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from backends.attention.layout import CausalLayout, PassLayout
from backends.attention.masks import alibi_bias
from backends.contract.backend import BackendError, ContextFull, SavedTensors, StreamUse
from backends.contract.mending import MendingBackend
from backends.hf.cache import BLOCK_ROWS, TreeCache, whole_blocks
from backends.hf.cpu_weights import CpuWeights
from backends.hf.forward import mask_maker, prepare_buffers, run_model
from backends.hf.layer_runner import LayerRunner, PassState, bind, unbind
from backends.hf.model import HfModel, load_hf_model
from backends.hf.prefix import load_prefix, prefix_tensors, save_prefix
from backends.hf.self_test import TorchExactness
from backends.hf.weights import TorchWeights
from offload.formats.mapped import TensorShape
from offload.process.interruptible import check_interrupt

CHUNK_ROWS = 256
"""Rows that go through a layer at once: bounds the activations of a long prompt."""

_ANY = TorchExactness(False)
_T = TypeVar("_T")


class TorchBackend(MendingBackend):
    """A Hugging Face checkpoint, computed where `weights` has it; `weights` is closed with it.

    cache_rows: rows of the KV cache that are allocated with its first one; more follow use.
    exactness: what it takes for a pass to be exact (see `Exactness`).
    """

    def __init__(
        self,
        model: HfModel,
        weights: TorchWeights,
        *,
        max_context: int | None = None,
        max_nodes: int | None = None,
        cache_rows: int = 0,
        exactness: TorchExactness = _ANY,
    ) -> None:
        self._model, self._weights = model, weights
        self._exactness = exactness
        self._make_mask = mask_maker(model, weights.device, exactness.limits)
        self._has_whole_cache = cache_rows > 0
        self.max_nodes = max_nodes
        self.vocab_size = model.vocab_size
        self.max_context = min(max_context or model.max_context, model.max_context)
        self._cache = TreeCache(len(model.layers), cache_rows)
        self._is_cancelled = False
        self._owner: TorchBackend | None = None
        self._turn = threading.Lock()  # siblings walk the same modules, one at a time
        try:
            with weights.computing():
                bind(model.outer_tensors, weights.outer, model.dtype)
                self._slopes = prepare_buffers(model, weights.device)
        except BaseException:
            unbind(model.outer_tensors)
            weights.close()
            raise
        self._runners = [
            LayerRunner(
                i,
                module,
                tensors,
                weights.layer,
                model.window(i),
                model.dtype,
                is_resident=weights.stays(i),
            )
            for i, (module, tensors) in enumerate(
                zip(model.layers, model.layer_tensors, strict=True)
            )
        ]

    @classmethod
    def resident(
        cls, directory: Path, *, max_context: int | None = None, exactness: TorchExactness = _ANY
    ) -> TorchBackend:
        """Load a whole checkpoint into the memory of the CPU."""
        model = load_hf_model(directory)
        return cls.held_in_memory(model, max_context=max_context, exactness=exactness)

    @classmethod
    def held_in_memory(
        cls, model: HfModel, *, max_context: int | None = None, exactness: TorchExactness = _ANY
    ) -> TorchBackend:
        """A backend on the CPU that streams nothing."""
        layers = [
            layer.with_resident(frozenset(t.name for t in layer.tensors))
            for layer in model.layer_weights
        ]
        weights = CpuWeights(model, layers, 0)
        return cls(model, weights, max_context=max_context, exactness=exactness)

    def sibling(self, *, max_context: int, max_nodes: int, max_rows: int) -> TorchBackend:
        """See Backend.sibling; the passes of the two take turns."""
        if not all(self._weights.stays(i) for i in range(len(self._runners))):
            raise BackendError("a streamed model cannot share its weights")
        other = copy.copy(self)
        other._owner = self
        other.max_context = min(max_context, self._model.max_context)
        other.max_nodes = max_nodes
        cache_rows = other.max_context + max_nodes if self._has_whole_cache else 0
        other._cache = TreeCache(len(self._model.layers), cache_rows)
        return other

    @property
    def _kv(self) -> TreeCache:
        return self._cache

    @property
    def stream_use(self) -> StreamUse:
        return self._weights.use

    @property
    def kv_bytes(self) -> int:
        return self._cache.n_bytes

    def kv_growth_bytes(self, n_tokens: int) -> int:
        """One block at least; while a layer moves to a longer buffer, the one before is there."""
        if self._has_whole_cache:
            return 0
        n_had = self._cache.capacity
        n_rows = whole_blocks(min(n_tokens, self.max_context) + (self.max_nodes or 0))
        n_new = max(n_rows - n_had, BLOCK_ROWS)
        return n_new * self._model.kv_bytes_per_token + n_had * self._model.layer_kv_bytes

    @property
    def n_kv_allocated(self) -> int:
        return self._cache.capacity

    @property
    def unread_bytes(self) -> int:
        return self._weights.unread_bytes

    @property
    def held_bytes(self) -> int:
        return self._weights.held_bytes

    def hold(self, n_bytes: int) -> None:
        self._weights.hold(n_bytes)

    def prefix_tensors(self) -> tuple[TensorShape, ...]:
        self._mending(self._cache.abort)
        return prefix_tensors(self._cache)

    def save_prefix(self, buffers: Mapping[str, memoryview]) -> None:
        self._mending(lambda: save_prefix(self._cache, buffers))

    def load_prefix(self, token_ids: Sequence[int], tensors: SavedTensors) -> None:
        self._mending(lambda: self._load_prefix(token_ids, tensors), n_intact=0)

    def request_cancel(self) -> None:
        """End a running pass at its next layer or chunk, or while it waits for storage, with a
        BackendError; any thread may call this."""
        self._is_cancelled = True

    def close(self) -> None:
        self._is_closed = True
        if self._owner is not None:
            self._cache.free()
            return
        self._weights.stop()
        for runner in self._runners:
            runner.detach()
        unbind(self._model.outer_tensors)
        self._cache.free()
        self._weights.close()

    def _mending(self, operation: Callable[[], _T], n_intact: int | None = None) -> _T:
        """The same with tensors of the weights' device."""

        def on_device() -> _T:
            with self._weights.computing(), torch.inference_mode():
                return operation()

        return super()._mending(on_device, n_intact)

    def _run_prompt(self, token_ids: Sequence[int]) -> np.ndarray:
        layout = CausalLayout(self.n_committed, len(token_ids))
        self._cache.expect(self.n_committed + len(token_ids))
        row: np.ndarray = self._forward(token_ids, layout, [len(token_ids) - 1])[0]
        return row

    def _run_nodes(
        self, token_ids: Sequence[int], parents: Sequence[int], rows: list[int]
    ) -> tuple[list[int], np.ndarray]:
        table = self._cache.table
        n_live = len(table)
        node_ids = table.add(parents, token_ids)
        self._check_context(table.max_depth, len(token_ids))
        layout = PassLayout(self.n_committed, table.positions(), table.visible(n_live))
        return node_ids, self._forward(token_ids, layout, rows)

    def _load_prefix(self, token_ids: Sequence[int], tensors: SavedTensors) -> None:
        self._cache.free()
        if len(token_ids) > self.max_context:
            raise ContextFull(len(token_ids), 0, self.max_context)
        try:
            device = self._weights.device
            load_prefix(self._cache, self._model, list(token_ids), tensors, device)
        except BackendError:
            self._cache.free()  # with the shapes that it took from the file
            raise

    def _check_cancel(self) -> None:
        check_interrupt()
        if self._is_cancelled:
            raise BackendError("the pass was cancelled")

    def _forward(self, token_ids: Sequence[int], layout: PassLayout, rows: list[int]) -> np.ndarray:
        """Run the model over new rows; float32 logits [len(rows), vocab]."""
        self._is_cancelled = False
        device = self._weights.device
        n_keys = layout.prefix + len(layout.node_positions)
        n_more = max(0, self._exactness.n_least_rows - len(token_ids))
        if n_more:
            layout = layout.padded(n_more)
        wanted = rows + rows[-1:] * (self._exactness.n_least_rows - len(rows))
        state = self._pass_state(layout)
        with self._turn:
            for runner in self._runners:
                runner.state = state
            logits = run_model(
                self._model,
                self._cache,
                torch.tensor([[*token_ids, *[token_ids[-1]] * n_more]], device=device),
                torch.from_numpy(layout.new_positions)[None].to(device),
                torch.tensor(wanted, device=device),
            )
            self._cache.truncate(n_keys)
            return self._weights.on_host(logits[: len(rows)])

    def _pass_state(self, layout: PassLayout) -> PassState:
        alibi = partial(alibi_bias, self._slopes, layout, dtype=self._model.dtype)
        return PassState(
            layout,
            self._make_mask,
            CHUNK_ROWS,
            self._exactness.n_least_rows,
            None if self._slopes is None else alibi,
            self._check_cancel,
        )

    def _repair(self, n_intact: int) -> None:
        self._cache.abort(n_intact)
        with self._turn:
            self._weights.restart()
