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
from typing import TypeVar, cast

import numpy as np
import torch

from backends.attention.batch import BLOCK_ROWS, BatchLayout
from backends.attention.masks import alibi_bias
from backends.contract.backend import BackendError, ContextFull, SavedTensors, StreamUse
from backends.contract.mending import MendingBackend
from backends.contract.sequence import SequenceRows, SequenceScores
from backends.hf.cpu_weights import CpuWeights
from backends.hf.forward import mask_maker, prepare_buffers, run_model
from backends.hf.layer_runner import LayerRunner, PassState, bind, unbind
from backends.hf.model import HfModel, load_hf_model
from backends.hf.prefix import load_prefix, prefix_tensors, save_prefix
from backends.hf.self_test import TorchExactness
from backends.hf.weights import TorchWeights
from backends.kv.pool import KvPool, blocks_of
from backends.kv.rows import NewRows, node_rows, prompt_rows, rows_of_pass, take_rows
from backends.kv.sequence import SequenceKv
from backends.kv.text import TorchSequence
from offload.formats.mapped import TensorShape
from offload.process.interruptible import check_interrupt

CHUNK_ROWS = 256
"""Rows that go through a layer at once: bounds the activations of a long prompt."""

_PLENTY_NODES = 8192
"""Live nodes that there is room for where nobody says how many."""
_ANY = TorchExactness(False)
_T = TypeVar("_T")


class TorchBackend(MendingBackend):
    """A Hugging Face checkpoint, computed where `weights` has it; `weights` is closed with it.

    kv_rows: tokens and nodes that all sequences together may have; None: enough for one of them.
    exactness: what it takes for a pass to be exact (see `Exactness`).
    """

    def __init__(
        self,
        model: HfModel,
        weights: TorchWeights,
        *,
        max_context: int | None = None,
        max_nodes: int | None = None,
        kv_rows: int | None = None,
        exactness: TorchExactness = _ANY,
    ) -> None:
        self._model, self._weights = model, weights
        self._exactness = exactness
        self._make_mask = mask_maker(model, weights.device, exactness.limits)
        self.max_nodes = max_nodes
        self.vocab_size = model.vocab_size
        self.max_context = min(max_context or model.max_context, model.max_context)
        self._gathers = weights.device.type != "cpu" or not model.takes_whole_cache
        self._make_cache(kv_rows)
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
        cls,
        model: HfModel,
        *,
        max_context: int | None = None,
        kv_rows: int | None = None,
        exactness: TorchExactness = _ANY,
    ) -> TorchBackend:
        """A backend on the CPU that streams nothing."""
        layers = [
            layer.with_resident(frozenset(t.name for t in layer.tensors))
            for layer in model.layer_weights
        ]
        weights = CpuWeights(model, layers, 0)
        return cls(model, weights, max_context=max_context, kv_rows=kv_rows, exactness=exactness)

    def sibling(self, *, max_context: int, max_nodes: int, max_rows: int) -> TorchBackend:
        """See Backend.sibling; the passes of the two take turns."""
        if not all(self._weights.stays(i) for i in range(len(self._runners))):
            raise BackendError("a streamed model cannot share its weights")
        other = copy.copy(self)
        other._owner = self
        other.max_context = min(max_context, self._model.max_context)
        other.max_nodes = max_nodes
        other._make_cache()
        return other

    def _make_cache(self, kv_rows: int | None = None) -> None:
        most = _PLENTY_NODES if self.max_nodes is None else self.max_nodes
        kv_rows = self.max_context + most if kv_rows is None else kv_rows
        n_blocks = blocks_of(kv_rows + self._exactness.n_least_rows)
        self._pool = KvPool(len(self._model.layers), n_blocks)
        self._text = SequenceKv(self._pool)

    @property
    def _kv(self) -> SequenceKv:
        return self._text

    @property
    def stream_use(self) -> StreamUse:
        return self._weights.use

    @property
    def kv_bytes(self) -> int:
        return self._pool.n_bytes

    def kv_growth_bytes(self, n_tokens: int) -> int:
        """Blocks that were never in use."""
        if self._weights.device.type != "cpu":
            return 0
        n_rows = min(n_tokens, self.max_context) + (self.max_nodes or 0)
        n_rows += self._exactness.n_least_rows
        n_new = max(0, blocks_of(n_rows) - self._pool.n_touched)
        return n_new * BLOCK_ROWS * self._model.kv_bytes_per_token

    @property
    def n_kv_allocated(self) -> int:
        return self._pool.n_touched * BLOCK_ROWS

    @property
    def unread_bytes(self) -> int:
        return self._weights.unread_bytes

    @property
    def held_bytes(self) -> int:
        return self._weights.held_bytes

    def hold(self, n_bytes: int) -> None:
        self._weights.hold(n_bytes)

    def prefix_tensors(self) -> tuple[TensorShape, ...]:
        self._mending(self._text.abort)
        return prefix_tensors(self._pool, self._text)

    def save_prefix(self, buffers: Mapping[str, memoryview]) -> None:
        self._mending(lambda: save_prefix(self._pool, self._text, buffers))

    def load_prefix(self, token_ids: Sequence[int], tensors: SavedTensors) -> None:
        self._mending(lambda: self._load_prefix(token_ids, tensors), n_intact=0)

    def request_cancel(self) -> None:
        """End a running pass at its next layer or chunk, or while it waits for storage, with a
        BackendError; any thread may call this."""
        self._is_cancelled = True

    def close(self) -> None:
        self._is_closed = True
        if self._owner is not None:
            self._free_cache()
            return
        self._weights.stop()
        for runner in self._runners:
            runner.detach()
        unbind(self._model.outer_tensors)
        self._free_cache()
        self._weights.close()

    def _free_cache(self) -> None:
        self._text.close()
        self._pool.free()

    def _repaired(self, operation: Callable[[], _T], repair: Callable[[], None]) -> _T:
        """The same with tensors of the weights' device."""

        def on_device() -> _T:
            with self._weights.computing(), torch.inference_mode():
                return operation()

        return super()._repaired(on_device, repair)

    def sequence(self) -> TorchSequence:
        """A text of its own beside others, empty as yet."""
        return TorchSequence(self, SequenceKv(self._pool))

    def run(self, batch: Sequence[SequenceRows]) -> list[SequenceScores]:
        """One pass over what each sequence adds; see SequenceRows."""
        sequences = [cast(TorchSequence, one.sequence) for one in batch]
        if len(set(map(id, sequences))) < len(sequences):
            raise ValueError("a sequence is in the batch twice")

        def grow() -> list[SequenceScores]:
            ids, new = zip(*map(self._rows_of, batch), strict=True)
            found = self._forward(new)
            for one, rows in zip(sequences, batch, strict=True):
                if rows.parents is None:
                    one.kv.append(rows.token_ids)
            return [SequenceScores(*pair) for pair in zip(ids, found, strict=True)]

        return self.mend(sequences, grow)

    def mend(
        self,
        sequences: Sequence[TorchSequence],
        operation: Callable[[], _T],
        n_intact: int | None = None,
    ) -> _T:
        """Call `operation` on these; after any failure their live nodes are dropped, their
        committed prefixes are what they were, and a ring begins at layer 0.

        n_intact: of one sequence, committed tokens that the operation leaves alone; None: all.
        """
        lengths = [one.n_committed if n_intact is None else n_intact for one in sequences]

        def repair() -> None:
            for one, length in zip(sequences, lengths, strict=True):
                one.kv.abort(length)
            with self._turn:
                self._weights.restart()

        return self._repaired(operation, repair)

    def _rows_of(self, rows: SequenceRows) -> tuple[list[int], NewRows]:
        sequence = cast(TorchSequence, rows.sequence)
        if sequence.is_closed:
            raise BackendError("the sequence is closed: begin another one")
        if not rows.token_ids:
            raise ValueError("a sequence adds at least one token")
        if rows.parents is None:
            sequence.kv.abort()
            self._check_length(sequence.kv, len(rows.token_ids), len(rows.token_ids))
            return [], prompt_rows(sequence.kv, rows.token_ids, rows.wanted)
        return self._nodes(sequence.kv, rows.token_ids, rows.parents, rows.wanted)

    def _run_prompt(self, token_ids: Sequence[int]) -> np.ndarray:
        last = [len(token_ids) - 1]
        row: np.ndarray = self._forward([prompt_rows(self._text, token_ids, last)])[0][0]
        return row

    def _run_nodes(
        self, token_ids: Sequence[int], parents: Sequence[int], rows: list[int]
    ) -> tuple[list[int], np.ndarray]:
        node_ids, new = self._nodes(self._text, token_ids, parents, rows)
        return node_ids, self._forward([new])[0]

    def _nodes(
        self, text: SequenceKv, token_ids: Sequence[int], parents: Sequence[int], rows: list[int]
    ) -> tuple[list[int], NewRows]:
        node_ids, new = node_rows(text, token_ids, parents, rows)
        self._check_length(text, text.table.max_depth, len(token_ids))
        return node_ids, new

    def _check_length(self, text: SequenceKv, depth: int, n_tokens: int) -> None:
        """Raise ContextFull where `n_tokens` new ones lead to that many after the prefix."""
        n_committed = text.table.n_committed
        if n_committed + depth > self.max_context:
            raise ContextFull(n_tokens, n_committed, self.max_context)

    def _load_prefix(self, token_ids: Sequence[int], tensors: SavedTensors) -> None:
        self._text.abort(0)
        if self._pool.is_unused:
            self._pool.free()
        if len(token_ids) > self.max_context:
            raise ContextFull(len(token_ids), 0, self.max_context)
        try:
            device = self._weights.device
            load_prefix(self._pool, self._text, self._model, list(token_ids), tensors, device)
        except BackendError:
            self._text.abort(0)
            if self._pool.is_unused:
                self._pool.free()  # with the shapes that it took from the file
            raise

    def _check_cancel(self) -> None:
        check_interrupt()
        if self._is_cancelled:
            raise BackendError("the pass was cancelled")

    def _forward(self, new: Sequence[NewRows]) -> list[np.ndarray]:
        """One pass over the new rows of one or more sequences; float32 logits [wanted, vocab] of
        each."""
        self._is_cancelled = False
        device = self._weights.device
        token_ids = [token for one in new for token in one.token_ids]
        n_more = max(0, self._exactness.n_least_rows - len(token_ids))
        places, batch = take_rows(new, n_more)
        self._pool.begin(places, batch if self._gathers else None)
        token_ids += token_ids[-1:] * n_more
        wanted = rows_of_pass(new)
        n_wanted = len(wanted)
        wanted += (wanted[-1:] or [0]) * max(self._exactness.n_least_rows - n_wanted, not n_wanted)
        state = self._pass_state(batch)
        with self._turn:
            for runner in self._runners:
                runner.state = state
            logits = run_model(
                self._model,
                self._pool,
                torch.tensor([token_ids], device=device),
                torch.from_numpy(batch.new_positions)[None].to(device),
                torch.tensor(wanted, device=device),
            )
            self._pool.check_written(len(token_ids))
            found = self._weights.on_host(logits[:n_wanted])
        ends = np.cumsum([len(one.rows) for one in new])
        return np.split(found, ends[:-1])

    def _pass_state(self, layout: BatchLayout) -> PassState:
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
        self._text.abort(n_intact)
        with self._turn:
            self._weights.restart()
