"""ModelRunner: forward passes of a transformers model over tokens of its sequences.

A forward runs the model's own code. Each decoder layer is wrapped by a `LayerRunner`, which
waits for its weights, binds them as zero-copy views of a ring slot and releases them afterwards.
Embeddings, final norm and head stay in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch

from backends.attention.batch import BatchLayout
from backends.attention.masks import alibi_bias
from backends.contract.backend import SCORED_ROWS, BackendError
from backends.contract.store import NewTokens, PassOutput
from backends.feedforward.experts import ExpertsRunner
from backends.hf.cache import ModelCache
from backends.hf.expert_records import fetch_matrices
from backends.hf.forward import (
    BodyOutput,
    first_pass,
    mask_maker,
    prepare_buffers,
    run_model,
)
from backends.hf.hidden_states import HiddenStates
from backends.hf.layer_runner import LayerRunner, PassState, bind, in_memory
from backends.hf.model import HfModel
from backends.hf.packed_forward import unbind
from backends.hf.self_test import TorchExactness
from backends.hf.weights import TorchWeights
from backends.kv.rows import (
    given_hidden_states,
    hidden_rows_of_pass,
    recurrent_pass,
    rows_of_pass,
    scored_rows_of_pass,
    take_rows,
)
from backends.kv.sequence import BlockStore
from backends.recurrent.passes import RecurrentPass, running

CHUNK_TOKENS = 256
"""Tokens that go through a layer at once: bounds the activations of a long prompt."""


class ModelRunner:
    """The parts of a model bound to its weights and its cache, until `detach`.

    Args:
        max_nodes: rows of logits that memory is planned for; None: no limit.
    """

    def __init__(
        self,
        model: HfModel,
        weights: TorchWeights,
        cache: ModelCache,
        exactness: TorchExactness,
        max_nodes: int | None = None,
    ) -> None:
        self._model, self._weights = model, weights
        self._cache, self._pool = cache, cache.pool
        self._max_nodes, self._min_batch_tokens = max_nodes, exactness.min_batch_tokens
        self._make_mask = mask_maker(model, weights.device, exactness.limits)
        self._gathers = weights.device.type != "cpu" or not model.takes_whole_cache
        self._has_run = False  # once a pass has ended, errors are not the config's fault
        self.hidden_state_layers: Sequence[int] = ()
        """See Backend.collect_hidden_states."""
        self.is_cancelled = False
        """Whether a running pass is to end; set by any thread."""
        self.layers: list[LayerRunner] = []
        self._experts: list[ExpertsRunner] = []
        try:
            with weights.computing():
                own = weights.non_layer
                bind(in_memory(model.non_layer_tensors, own), own, model.dtype)
                self._slopes = prepare_buffers(model, weights.device)
            self.layers.extend(map(self._make_layer, range(len(model.layers))))
            self._experts.extend(self._make_experts())
        except BaseException:
            self.detach()
            raise

    def _make_layer(self, index: int) -> LayerRunner:
        model, weights = self._model, self._weights
        return LayerRunner(
            index,
            model.layers[index],
            model.layer_tensors[index],
            weights.layer,
            model.window(index),
            model.dtype,
            is_resident=weights.stays(index),
            decoder=weights.decoder,
            has_attention=model.has_attention(index),
            looks_ahead=model.looks_ahead(index),
        )

    def _make_experts(self) -> Iterator[ExpertsRunner]:
        model, weights = self._model, self._weights
        for i, (module, own) in enumerate(
            zip(model.expert_modules, model.expert_matrices, strict=True)
        ):
            if module is not None and own is not None:
                fetch = partial(fetch_matrices, weights, model.dtype, i, own)
                yield ExpertsRunner(module, fetch, self._min_batch_tokens)

    def detach(self) -> None:
        """Detach from the model, which cannot compute afterwards. Idempotent."""
        for layer in self.layers:
            layer.detach()
        for experts in self._experts:
            experts.detach()
        unbind(self._model.non_layer_tensors)

    def run(
        self, new: Sequence[NewTokens[BlockStore]], stores: Sequence[BlockStore]
    ) -> list[PassOutput]:
        """Run a pass over new tokens; `stores` are those of all sequences of the cache."""
        num_tokens = sum(len(tokens.token_ids) for tokens in new)
        n_more = max(0, self._min_batch_tokens - num_tokens)
        places, batch = take_rows(new, n_more)
        tables = [part.table for part in batch.parts]
        self._pool.begin(places, tables, batch if self._gathers else None, self._check_cancel)
        recurrent = recurrent_pass(new) if self._model.recurrences else None
        hidden_states = self._hidden_states(new)
        state = self._pass_state(batch, recurrent, hidden_states)
        for layer in self.layers:
            layer.state = state
        for experts in self._experts:
            experts.check = state.check_cancel
        with running(recurrent):
            logits = self._logits(new, batch, n_more, hidden_states)
        self._cache.end_pass(stores, recurrent)
        logits_of = _split(logits, [len(tokens.logits_at) for tokens in new])
        if hidden_states is None:
            return list(map(PassOutput, logits_of))
        states = self._weights.on_host(hidden_states.joined())
        n_states = [len(tokens.hidden_states_at) for tokens in new]
        return list(map(PassOutput, logits_of, _split(states, n_states)))

    def _logits(
        self,
        new: Sequence[NewTokens[BlockStore]],
        batch: BatchLayout,
        n_more: int,
        hidden_states: HiddenStates | None,
    ) -> np.ndarray:
        """Run the model; return the logits that the pass returns, float32 [rows, vocab].

        n_more: padding tokens after those of `new`.
        """
        device = self._weights.device
        token_ids = [token for tokens in new for token in tokens.token_ids]
        token_ids += token_ids[-1:] * n_more
        rows = rows_of_pass(new)
        body = BodyOutput(self._model.model) if scored_rows_of_pass(new) else None
        checking = nullcontext() if self._has_run else first_pass(self._model, device)
        with checking, body.noting() if body else nullcontext():
            logits = run_model(
                self._model,
                self._pool,
                torch.tensor([token_ids], device=device),
                torch.from_numpy(batch.new_positions)[None].to(device),
                self._padded_rows(rows),
                hidden_states,
                given_hidden_states(new, n_more, self._model.dtype, device),
            )
        self._has_run = True
        self._pool.check_written(len(token_ids))
        self._pool.end(self._check_cancel)
        host_logits = self._weights.on_host(logits[: len(rows)])
        del logits
        if body is not None:
            self._score(new, body, len(rows))
        return host_logits

    def _padded_rows(self, rows: Sequence[int]) -> torch.Tensor:
        """Return rows of the head, at least so many that its product is batch-invariant."""
        n_padding = max(self._min_batch_tokens - len(rows), not rows)
        padding = (list(rows[-1:]) or [0]) * n_padding
        return torch.tensor([*rows, *padding], device=self._weights.device)

    def _score(
        self, new: Sequence[NewTokens[BlockStore]], body: BodyOutput, num_logits: int
    ) -> None:
        """Score the tokens of a pass that ask for it, a few rows at a time.

        num_logits: rows that the pass returns, within the `max_nodes` of the plan.
        """
        scores = [(tokens.score, at) for tokens in new for at in tokens.scored_at]
        free_rows = SCORED_ROWS if self._max_nodes is None else self._max_nodes - num_logits
        group = max(1, self._min_batch_tokens, min(SCORED_ROWS, free_rows))
        rows = scored_rows_of_pass(new)
        for start in range(0, len(rows), group):
            part = rows[start : start + group]
            logits = self._weights.on_host(body.logits(self._padded_rows(part))[: len(part)])
            for (score, at), row in zip(scores[start : start + group], logits, strict=True):
                if score is not None:
                    score(at, row)

    def _hidden_states(self, new: Sequence[NewTokens[BlockStore]]) -> HiddenStates | None:
        rows = hidden_rows_of_pass(new)
        if not rows:
            return None
        if not self.hidden_state_layers:
            raise BackendError("hidden states are returned after collect_hidden_states alone")
        device = self._weights.device
        return HiddenStates(self.hidden_state_layers, torch.tensor(rows, device=device))

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
            self._min_batch_tokens,
            None if self._slopes is None else alibi,
            self._check_cancel,
            self._pool.reading,
            recurrent,
            hidden_states,
        )

    def _check_cancel(self) -> None:
        if self.is_cancelled:
            raise BackendError("the pass was cancelled")


def _split(rows: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """Return consecutive parts of these sizes."""
    return np.split(rows, np.cumsum(sizes)[:-1])
