"""The torch backend: a transformers model whose decoder layers are streamed as they are needed.

A forward runs the model's own code. Each decoder layer is wrapped by a `LayerRunner`, which
waits for its weights, binds them as zero-copy views of a ring slot and releases them afterwards.
Embeddings, final norm and head stay in memory.

A `TorchWeights` decides where the weights come from and on which device they are: one reads them
into the memory of the CPU, the other copies them to a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from backends.attention.batch import BLOCK_SIZE, BatchLayout
from backends.attention.masks import alibi_bias
from backends.contract.backend import SCORED_ROWS, BackendError, KvUsage, TransferStats
from backends.contract.recovery import RecoveringBackend
from backends.contract.sequence import SavedTensors, SequenceInput
from backends.contract.store import NewTokens, PassOutput
from backends.feedforward.experts import ExpertsRunner, Matrix
from backends.hf.cpu_weights import CpuWeights
from backends.hf.expert_records import ExpertMatrix, StoredMatrix
from backends.hf.forward import (
    BodyOutput,
    first_pass,
    mask_maker,
    prepare_buffers,
    run_model,
)
from backends.hf.hidden_states import HiddenStates
from backends.hf.layer_runner import LayerRunner, PassState, as_tensor, bind, in_memory
from backends.hf.model import HfModel, load_hf_model
from backends.hf.packed_forward import unbind
from backends.hf.prefix import load_prefix, prefix_tensors, save_prefix
from backends.hf.self_test import TorchExactness
from backends.hf.threads import threads_of_pass
from backends.hf.weights import TorchWeights
from backends.kv.layer import PoolLayer
from backends.kv.pool import KvPool, blocks_of
from backends.kv.rows import (
    given_hidden_states,
    hidden_rows_of_pass,
    recurrent_pass,
    rows_of_pass,
    scored_rows_of_pass,
    take_rows,
)
from backends.kv.sequence import BlockStore, new_blocks
from backends.kv.tier_sizes import Tiers
from backends.kv.tiers import TieredPool
from backends.recurrent.memory import StateMemory, kept_bytes
from backends.recurrent.passes import RecurrentPass, running
from backends.recurrent.states import RecurrentStates
from offload.formats.mapped import TensorShape
from offload.formats.tensors import CheckpointError
from offload.ring.slots import Check

CHUNK_TOKENS = 256
"""Tokens that go through a layer at once: bounds the activations of a long prompt."""

_END_BLOCKS = 2
"""Hot blocks that the end of a prompt may take."""
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
        self._exactness = exactness
        self._make_mask = mask_maker(model, weights.device, exactness.limits)
        self.max_nodes = max_nodes
        self.vocab_size = model.vocab_size
        self.max_context = min(max_context or model.max_context, model.max_context)
        self._gathers = weights.device.type != "cpu" or not model.takes_whole_cache
        self._is_cancelled = False
        self._hidden_state_layers: Sequence[int] = ()
        self._has_run = False  # once a pass has ended, errors are not the config's fault
        try:
            self._make_cache(num_kv_slots, tiers)
        except BaseException:
            weights.close()
            raise
        try:
            with weights.computing():
                own = weights.non_layer
                bind(in_memory(model.non_layer_tensors, own), own, model.dtype)
                self._slopes = prepare_buffers(model, weights.device)
        except BaseException:
            unbind(model.non_layer_tensors)
            self._pool.close()
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
                decoder=weights.decoder,
                has_attention=model.has_attention(i),
                looks_ahead=model.looks_ahead(i),
            )
            for i, (module, tensors) in enumerate(
                zip(model.layers, model.layer_tensors, strict=True)
            )
        ]

        self._experts = [
            ExpertsRunner(module, partial(self._fetch_experts, i), exactness.min_batch_tokens)
            for i, module in enumerate(model.expert_modules)
            if module is not None
        ]

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
            model, weights, max_context=max_context, num_kv_slots=num_kv_slots, exactness=exactness
        )

    def _make_cache(self, num_kv_slots: int | None, tiers: Tiers | None) -> None:
        limit = _DEFAULT_MAX_NODES if self.max_nodes is None else self.max_nodes
        num_kv_slots = self.max_context + limit if num_kv_slots is None else num_kv_slots
        n_blocks = blocks_of(num_kv_slots + self._exactness.min_batch_tokens)
        model, formats = self._model, self._model.kv_formats
        self._states = StateMemory(
            model.state_bytes, model.fed_bytes_per_token, model.largest_state_bytes
        )
        self._pool: KvPool
        if tiers is None:
            without_kv = [i for i, n in enumerate(model.layer_kv_values) if not n]
            self._pool = KvPool(len(model.layers), n_blocks, without_kv, formats)
        else:
            token_bytes = list(map(sum, model.stored_kv_bytes))
            self._pool = TieredPool(n_blocks, token_bytes, tiers, formats)

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
        return kept_bytes(sequence.store.recurrent for sequence in tuple(self._sequences))

    def kv_growth_bytes(self, n_tokens: int, num_new_seqs: int = 0) -> int:
        """Bytes of states and of blocks not used before."""
        if self._weights.device.type != "cpu":
            return 0
        kvs, n_nodes = [sequence.store for sequence in self._sequences], self.max_nodes or 0
        num_tokens = n_tokens + n_nodes + self._exactness.min_batch_tokens
        n_new = new_blocks(kvs, num_tokens, num_new_seqs)
        block_bytes = BLOCK_SIZE * self._model.kv_bytes_per_token
        states = self._states.growth_bytes([kv.recurrent for kv in kvs], n_nodes, num_new_seqs)
        return self._pool.growth_bytes(n_new, block_bytes) + states

    @property
    def unused_kv_bytes(self) -> int:
        return self._pool.unused_bytes if self._weights.device.type == "cpu" else 0

    def release_unused_kv(self) -> None:
        if self._weights.device.type == "cpu":
            self._pool.release_unused()

    @property
    def n_kv_allocated(self) -> int:
        return self._pool.n_touched * BLOCK_SIZE

    @property
    def kv_usage(self) -> KvUsage:
        pool = self._pool
        return KvUsage(BLOCK_SIZE * (pool.n_blocks - pool.n_free), BLOCK_SIZE * pool.n_shared)

    @property
    def unread_bytes(self) -> int:
        return self._weights.unread_bytes

    @property
    def pinned_bytes(self) -> int:
        return self._weights.pinned_bytes

    def set_pinned_bytes(self, n_bytes: int) -> None:
        self._weights.set_pinned_bytes(n_bytes)

    def collect_hidden_states(self, layers: Sequence[int]) -> None:
        self._hidden_state_layers = tuple(layers)

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
        self._is_cancelled = True

    def close(self) -> None:
        self._is_closed = True
        self._weights.stop()
        for runner in self._runners:
            runner.detach()
        for experts in self._experts:
            experts.detach()
        unbind(self._model.non_layer_tensors)
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
        return BlockStore(self._pool, RecurrentStates() if self._model.recurrences else None)

    def _fork(self, kv: BlockStore, length: int) -> BlockStore:
        return kv.fork(length)

    def _num_free_slots(self, kv: BlockStore) -> int:
        return min(kv.num_free_slots - self._exactness.min_batch_tokens, self.max_context)

    def _capacity_of(self, kv: BlockStore, rows: SequenceInput) -> Sequence[int]:
        n_blocks = kv.n_blocks_for(len(rows.token_ids))
        if self._pool.n_hot is None:
            return (n_blocks,)
        # A prompt's tokens may go to cold blocks, but for those that its next step changes.
        return n_blocks, _END_BLOCKS if rows.parents is None else kv.n_end_blocks(
            len(rows.token_ids)
        )

    def _free_units(self) -> Sequence[int]:
        n_more = blocks_of(self._exactness.min_batch_tokens)
        n_free, n_hot = self._pool.n_free - n_more, self._pool.n_hot
        return (n_free,) if n_hot is None else (n_free, n_hot - n_more)

    def _restart(self) -> None:
        self._pool.abandon()
        self._weights.restart()

    def _prefix_tensors(self, kv: BlockStore) -> tuple[TensorShape, ...]:
        return prefix_tensors(self._pool, kv)

    def _save_prefix(self, kv: BlockStore, buffers: Mapping[str, memoryview]) -> None:
        save_prefix(self._pool, kv, buffers)

    def _finish(self, kv: BlockStore) -> None:
        if kv.recurrent is not None:
            kv.recurrent.rest()

    def _load_prefix(self, kv: BlockStore, token_ids: list[int], tensors: SavedTensors) -> None:
        self._pool.free_if_unused()
        try:
            device = self._weights.device
            load_prefix(self._pool, kv, self._model, token_ids, tensors, device)
        except (BackendError, CheckpointError):
            kv.abort(0)
            self._pool.free_if_unused()  # with the shapes that it took from the file
            raise

    def _check_cancel(self) -> None:
        if self._is_cancelled:
            raise BackendError("the pass was cancelled")

    def _compute(self, new: Sequence[NewTokens[BlockStore]]) -> list[PassOutput]:
        self._is_cancelled = False
        with threads_of_pass(self._n_threads, self._follows_load):
            return self._run_pass(new)

    def _run_pass(self, new: Sequence[NewTokens[BlockStore]]) -> list[PassOutput]:
        device = self._weights.device
        token_ids = [token for tokens in new for token in tokens.token_ids]
        n_more = max(0, self._exactness.min_batch_tokens - len(token_ids))
        places, batch = take_rows(new, n_more)
        tables = [part.table for part in batch.parts]
        gathered = batch if self._gathers else None
        self._pool.begin(places, tables, gathered, self._check_cancel)
        token_ids += token_ids[-1:] * n_more
        logit_rows = rows_of_pass(new)
        num_logits = len(logit_rows)
        recurrent = recurrent_pass(new) if self._model.recurrences else None
        hidden_states = self._hidden_states(new)
        state = self._pass_state(batch, recurrent, hidden_states)
        with running(recurrent):
            for runner in self._runners:
                runner.state = state
            for experts in self._experts:
                experts.check = state.check_cancel
            body = BodyOutput(self._model.model) if scored_rows_of_pass(new) else None
            checking = nullcontext() if self._has_run else first_pass(self._model, device)
            with checking, body.noting() if body else nullcontext():
                logits = run_model(
                    self._model,
                    self._pool,
                    torch.tensor([token_ids], device=device),
                    torch.from_numpy(batch.new_positions)[None].to(device),
                    self._padded_rows(logit_rows),
                    hidden_states,
                    given_hidden_states(new, n_more, self._model.dtype, device),
                )
            self._has_run = True
            self._pool.check_written(len(token_ids))
            self._pool.end(self._check_cancel)
            host_logits = self._weights.on_host(logits[:num_logits])
            del logits
            if body is not None:
                self._score(new, body, num_logits)
        if recurrent is not None:
            self._states.succeed([item.store.recurrent for item in self._sequences], recurrent)
        ends = np.cumsum([len(tokens.logits_at) for tokens in new])
        logits_of = np.split(host_logits, ends[:-1])
        if hidden_states is None:
            return list(map(PassOutput, logits_of))
        ends = np.cumsum([len(tokens.hidden_states_at) for tokens in new])
        states = np.split(self._weights.on_host(hidden_states.joined()), ends[:-1])
        return list(map(PassOutput, logits_of, states))

    def _padded_rows(self, rows: Sequence[int]) -> torch.Tensor:
        """Return rows of the head, at least so many that its product is batch-invariant."""
        n_padding = max(self._exactness.min_batch_tokens - len(rows), not rows)
        padding = (list(rows[-1:]) or [0]) * n_padding
        return torch.tensor([*rows, *padding], device=self._weights.device)

    def _score(
        self, new: Sequence[NewTokens[BlockStore]], body: BodyOutput, num_logits: int
    ) -> None:
        """Score the tokens of a pass that ask for it, a few rows at a time.

        num_logits: rows that the pass returns, within the `max_nodes` that memory is planned for.
        """
        rows = scored_rows_of_pass(new)
        scores = [(tokens.score, at) for tokens in new for at in tokens.scored_at]
        free_rows = SCORED_ROWS if self.max_nodes is None else self.max_nodes - num_logits
        group = max(1, self._exactness.min_batch_tokens, min(SCORED_ROWS, free_rows))
        for start in range(0, len(rows), group):
            part = rows[start : start + group]
            logits = body.logits(self._padded_rows(part))
            for (score, at), row in zip(
                scores[start : start + group],
                self._weights.on_host(logits[: len(part)]),
                strict=True,
            ):
                if score is not None:
                    score(at, row)

    def _hidden_states(self, new: Sequence[NewTokens[BlockStore]]) -> HiddenStates | None:
        rows = hidden_rows_of_pass(new)
        if not rows:
            return None
        if not self._hidden_state_layers:
            raise BackendError("hidden states are returned after collect_hidden_states alone")
        device = self._weights.device
        return HiddenStates(self._hidden_state_layers, torch.tensor(rows, device=device))

    def _fetch_experts(
        self, layer: int, experts: Sequence[int], check: Check | None
    ) -> Generator[tuple[int, list[Matrix]], None, None]:
        own = self._model.expert_matrices[layer]
        fetch = self._weights.fetch_experts
        assert own is not None, f"layer {layer} has no experts"
        assert fetch is not None, "the weights have no experts"
        with closing(fetch(layer, experts, check)) as fetched:
            for expert, tensors in fetched:
                left = iter(tensors)
                parts = [[next(left) for _ in matrix.parts] for matrix in own[expert]]
                yield expert, list(map(self._matrix, own[expert], parts))

    def _matrix(self, matrix: ExpertMatrix, parts: Sequence[torch.Tensor]) -> Matrix:
        if matrix.packed is None:
            return as_tensor(parts[0], matrix.record, self._model.dtype)
        return StoredMatrix(self._weights.decoder, matrix.packed, parts)

    def _pass_state(
        self,
        layout: BatchLayout,
        recurrent: RecurrentPass | None,
        hidden_states: HiddenStates | None,
    ) -> PassState:
        alibi = partial(alibi_bias, self._slopes, layout, dtype=self._model.dtype)
        return PassState(
            layout,
            self._make_mask,
            CHUNK_TOKENS,
            self._exactness.min_batch_tokens,
            None if self._slopes is None else alibi,
            self._check_cancel,
            self._pool.reading,
            recurrent,
            hidden_states,
        )
