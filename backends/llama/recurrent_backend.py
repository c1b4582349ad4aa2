"""RecurrentLlamaBackend: a GGUF model with recurrent layers on llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from backends.contract.sequence import NO_HIDDEN_STATES, SavedTensors, SequenceInput
from backends.contract.store import NewTokens, PassOutput
from backends.gguf.model import GgufModel
from backends.llama.base import CellCounts, GgufBackend
from backends.llama.batch import Batch
from backends.llama.context import ContextOptions
from backends.llama.prefix import RecurrentPrefix, SequenceState
from backends.llama_states.state_inputs import StateInputs
from backends.llama_states.states import States
from backends.llama_states.store import MAX_REPLAYED, Lane, RecurrentStore
from offload.formats.mapped import TensorShape
from offload.process.cpus import usable_cpus


class _OutputRows:
    """Logits and hidden states of a sequence's new tokens, as its lanes compute them."""

    def __init__(self, new: NewTokens[RecurrentStore], vocab_size: int) -> None:
        self._new = new
        self.logits_at = {index: row for row, index in enumerate(sorted(set(new.logits_at)))}
        """Rows of logits by the index of the token."""
        self.states_at = {index: row for row, index in enumerate(sorted(set(new.hidden_states_at)))}
        self._logits = np.zeros((len(self.logits_at), vocab_size), dtype=np.float32)
        self._states = NO_HIDDEN_STATES

    def take(self, indices: Sequence[int], output: PassOutput) -> None:
        """Take the results of a pass in which these tokens were, in its order."""
        self._logits[[self.logits_at[i] for i in indices if i in self.logits_at]] = output.logits
        rows = [self.states_at[i] for i in indices if i in self.states_at]
        if rows:
            if not len(self._states):
                shape = (len(self.states_at), output.hidden_states.shape[1])
                self._states = np.zeros(shape, dtype=np.float32)
            self._states[rows] = output.hidden_states

    @property
    def output(self) -> PassOutput:
        logits = self._logits[[self.logits_at[i] for i in self._new.logits_at]]
        if not self.states_at:
            return PassOutput(logits)
        return PassOutput(
            logits, self._states[[self.states_at[i] for i in self._new.hidden_states_at]]
        )


class RecurrentLlamaBackend(GgufBackend[RecurrentStore]):
    """See GgufBackend. A pass computes one sequence's chain; other chains and the branches of a
    tree take passes of their own, each of which reads a streamed model."""

    _state_inputs: StateInputs | None = None

    def _new_state_inputs(self, model: GgufModel, options: ContextOptions) -> StateInputs | None:
        max_tokens = options.max_rollback_tokens
        n_bytes = model.state_input_bytes(max_tokens)
        inputs = StateInputs(options.n_threads or usable_cpus(), max_tokens, n_bytes)
        self._closing.append(inputs.close)
        self._state_inputs = inputs
        return inputs

    def _open_sequences(self, options: ContextOptions) -> None:
        n_cells = self._context.n_cells - options.n_fillers
        self._states = States(
            self._model.library,
            self._context.memory,
            options.n_states,
            n_cells,
            self._state_inputs,
        )
        self._prefix = RecurrentPrefix(SequenceState(self._model, self._context))

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
        return self._prefix.tensors(kv)

    def _save_prefix(self, kv: RecurrentStore, buffers: Mapping[str, memoryview]) -> None:
        self._prefix.save(kv, buffers)

    def _load_prefix(self, kv: RecurrentStore, token_ids: list[int], tensors: SavedTensors) -> None:
        self._check_capacity(kv, len(token_ids))
        self._prefix.load(kv, token_ids, tensors)

    # --- passes -----------------------------------------------------------------------------

    def _compute(self, new: Sequence[NewTokens[RecurrentStore]]) -> list[PassOutput]:
        self._check_outputs(sum(len(set(tokens.logits_at)) for tokens in new))
        n_new = sum(len(t.token_ids) for t in new if not t.are_nodes)  # nodes are counted already
        self._check_capacity(new[0].store, n_new)
        return list(map(self._compute_sequence, new))

    def _compute_sequence(self, new: NewTokens[RecurrentStore]) -> PassOutput:
        store, requested = new.store, sorted({*new.logits_at, *new.hidden_states_at})
        rows = _OutputRows(new, self.vocab_size)
        if new.are_nodes:
            if len(store.replayed) >= MAX_REPLAYED:
                self._run_lane(store, Lane([], {}), rows)
                store.promote_live()
            lanes = store.node_lanes(len(new.token_ids), requested)
        else:
            lanes = [Lane(list(map(int, new.token_ids)), {i: i for i in requested})]
        for lane in lanes:
            self._run_lane(store, lane, rows)
        return rows.output

    def _run_lane(self, store: RecurrentStore, lane: Lane, output: _OutputRows) -> None:
        """Compute a lane; put the logits and hidden states of its `places` into `output`."""
        min_count = self._options.min_batch_tokens
        state, tokens = store.go_on(lane)
        for release in self._states.releases:
            if self._states.has_capacity(max(len(tokens), min_count)):
                break
            release()
            state, tokens = store.go_on(lane)  # from its checkpoint, or the first token on
        first = len(tokens) - len(lane.token_ids)
        places = {first + i: index for i, index in lane.places.items()}
        for start, stop in pairwise(self._borders(len(tokens))):
            part = tokens[start:stop]
            inside = {i - start: index for i, index in places.items() if start <= i < stop}
            end = len(state) + len(part)
            # Rejected nodes and padding come last; only passes from the base on are rolled back.
            may_end_earlier = len(store.table) > 0 or len(part) < min_count
            is_kept = may_end_earlier and len(state) == store.n_base
            batch = Batch(
                part,
                range(len(state), end),
                [[state.sequence]] * len(part),
                [i for i, index in inside.items() if index in output.logits_at],
                min_count,
                state.sequence,
                end,
                state_rows=[i for i, index in inside.items() if index in output.states_at],
                rollback_start=(state.sequence, len(state)) if is_kept else None,
            )
            output.take(list(inside.values()), self._run(batch))
            store.went(part, batch.n_fillers)
        self._states.check_length(state)

    def _borders(self, n_tokens: int) -> list[int]:
        """Return where a lane is cut into passes. The last part is not shorter than a pass without
        padding, if the lane is not: a state that has gone through padding cannot be kept."""
        borders = [*range(0, n_tokens, self.max_num_tokens), n_tokens]
        shortest = self._options.min_batch_tokens
        if len(borders) > 2 and n_tokens - borders[-2] < shortest:
            borders[-2] = n_tokens - shortest
        return borders
