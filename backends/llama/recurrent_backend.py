"""RecurrentLlamaBackend: a GGUF model with recurrent layers on llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from backends.contract.backend import BackendError
from backends.contract.sequence import SavedTensors, SequenceInput
from backends.contract.store import NewTokens, PassOutput
from backends.llama.base import CellCounts, GgufBackend
from backends.llama.batch import Batch
from backends.llama.context import ContextOptions
from backends.llama_states.states import States
from backends.llama_states.store import MAX_REPLAYED, Lane, RecurrentStore
from offload.formats.mapped import TensorShape


class RecurrentLlamaBackend(GgufBackend[RecurrentStore]):
    """See GgufBackend. A pass computes one sequence's chain; other chains and the branches of a
    tree take passes of their own, each of which reads a streamed model."""

    can_save_prefix = False

    def _open_sequences(self, options: ContextOptions) -> None:
        n_cells = self._context.n_cells - options.n_fillers
        self._states = States(self._model.library, self._context.memory, options.n_states, n_cells)

    @property
    def _counts(self) -> CellCounts:
        return self._states

    def _new_kv(self) -> RecurrentStore:
        return RecurrentStore(self._states)

    def _fork(self, kv: RecurrentStore, length: int) -> RecurrentStore:
        return kv.fork(length)

    def _capacity_of(self, kv: RecurrentStore, rows: SequenceInput) -> Sequence[int]:
        return (len(rows.token_ids),)

    def _free_units(self) -> Sequence[int]:
        return (self._states.n_free,)

    def _prefix_tensors(self, kv: RecurrentStore) -> tuple[TensorShape, ...]:
        raise BackendError("the KV of a GGUF model with recurrent layers cannot be saved")

    def _save_prefix(self, kv: RecurrentStore, buffers: Mapping[str, memoryview]) -> None:
        self._prefix_tensors(kv)

    def _load_prefix(self, kv: RecurrentStore, token_ids: list[int], tensors: SavedTensors) -> None:
        self._prefix_tensors(kv)

    # --- passes -----------------------------------------------------------------------------

    def _compute(self, new: Sequence[NewTokens[RecurrentStore]]) -> list[PassOutput]:
        self._check_outputs(sum(len(set(tokens.logits_at)) for tokens in new))
        n_new = sum(len(t.token_ids) for t in new if not t.are_nodes)  # nodes are counted already
        self._check_capacity(new[0].store, n_new)
        return [PassOutput(self._compute_sequence(tokens)) for tokens in new]

    def _compute_sequence(self, new: NewTokens[RecurrentStore]) -> np.ndarray:
        """Return float32 logits [n_logits, vocab]."""
        store, requested = new.store, sorted(set(new.logits_at))
        if new.are_nodes:
            if len(store.replayed) >= MAX_REPLAYED:
                self._run_lane(store, Lane([], {}))
                store.promote_live()
            lanes = store.node_lanes(len(new.token_ids), requested)
        else:
            lanes = [Lane(list(map(int, new.token_ids)), {i: i for i in requested})]
        row_of = {index: row for row, index in enumerate(requested)}
        logits = np.zeros((len(requested), self.vocab_size), dtype=np.float32)
        for lane in lanes:
            rows = self._run_lane(store, lane)
            logits[[row_of[index] for index in lane.places.values()]] = rows
        return logits[[row_of[index] for index in new.logits_at]]

    def _run_lane(self, store: RecurrentStore, lane: Lane) -> np.ndarray:
        """Return the logits of the lane's `places`, in their order."""
        min_count, logits = self._options.min_batch_tokens, [self._no_logits()]
        state, tokens = store.go_on(lane)
        if not self._states.ensure(max(len(tokens), min_count)):
            state, tokens = store.go_on(lane)  # from the first token on
        first = len(tokens) - len(lane.token_ids)
        places = np.array([first + i for i in lane.places], dtype=np.int64)
        for start, stop in pairwise(self._borders(len(tokens))):
            part = tokens[start:stop]
            rows = places[(places >= start) & (places < start + len(part))] - start
            end = len(state) + len(part)
            batch = Batch(
                part,
                range(len(state), end),
                [[state.sequence]] * len(part),
                rows,
                min_count,
                state.sequence,
                end,
            )
            logits.append(self._run(batch))
            store.went(part, batch.n_fillers)
        self._states.check_length(state)
        return np.concatenate(logits)

    def _borders(self, n_tokens: int) -> list[int]:
        """Return where a lane is cut into passes. The last part is not shorter than a pass without
        padding, if the lane is not: a state that has gone through padding cannot be kept."""
        borders = [*range(0, n_tokens, self.max_num_tokens), n_tokens]
        shortest = self._options.min_batch_tokens
        if len(borders) > 2 and n_tokens - borders[-2] < shortest:
            borders[-2] = n_tokens - shortest
        return borders

    def _no_logits(self) -> np.ndarray:
        return np.zeros((0, self.vocab_size), dtype=np.float32)
