"""RecoveringBackend: its sequences, and recovery after an operation that failed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Generic, TypeVar, cast

import numpy as np

from backends.contract.backend import Backend, BackendError, ContextFull
from backends.contract.sequence import SavedTensors, SequenceInput, SequenceKV, SequenceOutput
from backends.contract.store import NewTokens, PassOutput, Store
from offload.formats.mapped import TensorShape

_T = TypeVar("_T")


class RecoverableKV(SequenceKV, Generic[Store]):
    """One sequence of a RecoveringBackend."""

    backend: RecoveringBackend[Store]

    def __init__(self, backend: RecoveringBackend[Store], kv: Store) -> None:
        self.backend, self.store = backend, kv
        self.is_closed = False

    @property
    def committed_ids(self) -> Sequence[int]:
        return self.store.table.committed

    @property
    def next_node_id(self) -> int:
        return self.store.table.next_id

    @property
    def num_free_slots(self) -> int:
        return self.backend.num_free_slots_of(self.store)

    def commit(self, path: Sequence[int], keep: Collection[int] = ()) -> None:
        self._recovering(lambda: self.store.commit(path, keep))

    def prune(self, nodes: Collection[int]) -> None:
        self._recovering(lambda: self.store.prune(nodes))

    def restorable(self, length: int) -> int:
        return self.store.restorable(length)

    @property
    def snapshot_lengths(self) -> Sequence[int]:
        return self.store.snapshot_lengths

    def rollback(self, length: int) -> None:
        n_intact = length if 0 <= length <= self.n_committed else None
        self._recovering(lambda: self.store.rollback(length), n_intact)

    def finish(self) -> None:
        super().finish()
        self.backend._finish(self.store)

    def prefix_tensors(self) -> tuple[TensorShape, ...]:
        def shapes() -> tuple[TensorShape, ...]:
            self.store.abort()
            return self.backend._prefix_tensors(self.store)

        return self._recovering(shapes)

    def save_prefix(self, buffers: Mapping[str, memoryview]) -> None:
        self._recovering(lambda: self.backend._save_prefix(self.store, buffers))

    def load_prefix(self, token_ids: Sequence[int], tensors: SavedTensors) -> None:
        def load() -> None:
            self.store.rollback(0)
            self.backend._check_length(self.store, len(token_ids), len(token_ids))
            self.backend._load_prefix(self.store, list(token_ids), tensors)

        self._recovering(load, n_intact=0)

    def fork(self, length: int | None = None) -> RecoverableKV[Store]:
        n_tokens = self.n_committed if length is None else length
        if not 0 <= n_tokens <= self.n_committed:
            raise BackendError(f"cannot fork at {n_tokens}: {self.n_committed} are committed")
        self.check_open()
        return self.backend._begin(lambda: self.backend._fork(self.store, n_tokens))

    def close(self) -> None:
        if not self.is_closed:
            self.backend._end(self)

    def check_open(self) -> None:
        if self.is_closed:
            raise BackendError("the sequence is closed: begin another one")

    def _recovering(self, operation: Callable[[], _T], n_intact: int | None = None) -> _T:
        self.check_open()
        return self.backend.recovering([self], operation, n_intact)


class RecoveringBackend(Backend, Generic[Store]):
    """A backend that recovers its sequences after an operation that an error cut short."""

    _is_closed = False
    _computes_scores = False
    """Whether `_compute` scores tokens itself, without returning their logits."""

    def __init__(self) -> None:
        self._sequences: list[RecoverableKV[Store]] = []
        self._recoveries: list[Callable[[], None]] = []
        """Recovery functions of failed operations that are still to be called, the oldest first."""

    # --- to be implemented by a backend -----------------------------------------------------

    @abstractmethod
    def _new_kv(self) -> Store:
        """Return the store of an empty sequence."""

    @abstractmethod
    def _fork(self, kv: Store, length: int) -> Store:
        """Return another store that shares the first `length` tokens of the prefix."""

    @abstractmethod
    def _compute(self, new: Sequence[NewTokens[Store]]) -> list[PassOutput]:
        """Run a pass over tokens that fit; return the results of each sequence."""

    @abstractmethod
    def _num_free_slots(self, kv: Store) -> int:
        """Return how many more tokens or nodes memory allows this sequence."""

    @abstractmethod
    def _capacity_of(self, kv: Store, rows: SequenceInput) -> Sequence[int]:
        """Return how many units of each kind (blocks or cells, llama.cpp's sequences) these new
        tokens of a sequence take."""

    @abstractmethod
    def _free_units(self) -> Sequence[int]:
        """Return how many units of each kind are free for all sequences together."""

    @abstractmethod
    def _restart(self) -> None:
        """Restart the ring of streamed layers, if there is one, at layer 0."""

    @abstractmethod
    def _prefix_tensors(self, kv: Store) -> tuple[TensorShape, ...]: ...

    @abstractmethod
    def _save_prefix(self, kv: Store, buffers: Mapping[str, memoryview]) -> None: ...

    @abstractmethod
    def _load_prefix(self, kv: Store, token_ids: list[int], tensors: SavedTensors) -> None:
        """Fill an empty store. Raises BackendError for tensors that are no such prefix."""

    def _finish(self, kv: Store) -> None:
        """Free what only passes of a sequence need."""
        return

    # --- sequences --------------------------------------------------------------------------

    def new_sequence(self) -> RecoverableKV[Store]:
        return self._begin(self._new_kv)

    def _begin(self, make: Callable[[], Store]) -> RecoverableKV[Store]:
        made: list[RecoverableKV[Store]] = []

        def add() -> None:
            made.append(RecoverableKV(self, make()))
            self._sequences += made

        self._guarded(add, lambda: None)
        return made[0]

    def _end(self, sequence: RecoverableKV[Store]) -> None:
        sequence.is_closed = True
        self._sequences.remove(sequence)
        if not self._is_closed:
            sequence.store.close()

    @property
    def num_free_nodes(self) -> int:
        if self.max_nodes is None:
            return super().num_free_nodes
        return self.max_nodes - self._n_live

    def num_free_slots_of(self, kv: Store) -> int:
        """See SequenceKV.num_free_slots."""
        return max(0, min(self._num_free_slots(kv), self.num_free_nodes))

    def n_fitting(self, batch: Sequence[SequenceInput]) -> int:
        n_nodes, n_units = self._n_live, np.array(self._free_units())
        for n_before, added in enumerate(batch):
            kv, n_tokens = cast(RecoverableKV[Store], added.kv).store, len(added.token_ids)
            n_units -= self._capacity_of(kv, added)
            n_nodes += n_tokens if added.parents is not None else -len(kv.table)
            if (n_units < 0).any():
                return n_before
            if self.max_nodes is not None and n_nodes > self.max_nodes:
                return n_before
        return len(batch)

    @property
    def _n_live(self) -> int:
        return sum(len(sequence.store.table) for sequence in self._sequences)

    # --- passes -----------------------------------------------------------------------------

    def forward(self, batch: Sequence[SequenceInput]) -> list[SequenceOutput]:
        sequences = [cast(RecoverableKV[Store], added.kv) for added in batch]
        if len(set(map(id, sequences))) < len(sequences):
            raise ValueError("a sequence is in the batch twice")
        for sequence in sequences:
            sequence.check_open()
            if sequence.backend is not self:
                raise ValueError("a sequence of another backend is in the batch")

        def grow() -> list[SequenceOutput]:
            for sequence, added in zip(sequences, batch, strict=True):
                if added.parents is None:
                    sequence.store.abort()
            ids, new = zip(*map(self._new_tokens, sequences, batch), strict=True)
            computed = [tokens for tokens in new if tokens.token_ids]
            computed_outputs = iter(self._compute_and_score(computed) if computed else ())
            for tokens in computed:
                if not tokens.are_nodes:
                    tokens.store.append(tokens.token_ids)
                tokens.store.check_integrity()
            empty = PassOutput(np.zeros((0, self.vocab_size), dtype=np.float32))
            outputs = [next(computed_outputs) if tokens.token_ids else empty for tokens in new]
            return [
                SequenceOutput(nodes, *output) for nodes, output in zip(ids, outputs, strict=True)
            ]

        return self.recovering(sequences, grow) if batch else []

    def _compute_and_score(self, new: Sequence[NewTokens[Store]]) -> list[PassOutput]:
        if self._computes_scores:
            return self._compute(new)
        outputs = self._compute([tokens.with_scored_logits() for tokens in new])
        return [tokens.scored(output) for tokens, output in zip(new, outputs, strict=True)]

    def _new_tokens(
        self, sequence: RecoverableKV[Store], added: SequenceInput
    ) -> tuple[list[int], NewTokens[Store]]:
        """Add new nodes to the table; return their ids and the tokens to compute."""
        kv, n_tokens = sequence.store, len(added.token_ids)
        context = cast(RecoverableKV[Store] | None, added.context)
        if context is not None:
            context.check_open()
        new = NewTokens(
            kv,
            added.token_ids,
            added.logit_positions,
            added.parents is not None,
            added.hidden_states_at,
            added.hidden_states,
            None if context is None else context.store,
            added.scored_at,
            added.score,
        )
        if added.parents is None:
            self._check_length(kv, n_tokens, n_tokens)
            return [], new
        self._check_nodes(self._n_live + n_tokens)
        node_ids = kv.add(added.parents, added.token_ids)
        self._check_length(kv, kv.table.max_depth, n_tokens)
        return node_ids, new

    def _check_nodes(self, n_nodes: int) -> None:
        if self.max_nodes is not None and n_nodes > self.max_nodes:
            raise BackendError(
                f"{n_nodes} live nodes are more than the {self.max_nodes} that this "
                "backend was made for: draft fewer tokens or raise max_nodes"
            )

    def _check_length(self, kv: Store, depth: int, n_tokens: int) -> None:
        """Raise ContextFull if `n_tokens` new tokens exceed the context at this depth."""
        n_committed = kv.table.n_committed
        if n_committed + depth > self.max_context:
            raise ContextFull(n_tokens, n_committed, self.max_context)

    # --- recovery ---------------------------------------------------------------------------

    def recovering(
        self,
        sequences: Sequence[RecoverableKV[Store]],
        operation: Callable[[], _T],
        n_intact: int | None = None,
    ) -> _T:
        """Call `operation`; after a failure drop the sequences' live nodes and restore their
        committed prefixes.

        n_intact: committed tokens of one sequence that the operation does not touch; None: all.
        """
        lengths = [sequence.n_committed if n_intact is None else n_intact for sequence in sequences]

        def recover() -> None:
            for sequence, length in zip(sequences, lengths, strict=True):
                if not sequence.is_closed:
                    sequence.store.abort(length)
            self._restart()

        return self._guarded(operation, recover)

    def _guarded(self, operation: Callable[[], _T], recover: Callable[[], None]) -> _T:
        """Call `operation`, and `recover` after a failure. If `recover` fails too, call it again
        before the next operation."""
        if self._is_closed:
            raise BackendError("the backend is closed; load the model again")
        self._recover_all()
        try:
            return operation()
        except BaseException:
            self._recoveries.append(recover)
            with suppress(Exception):  # the caller gets the error of the operation
                self._recover_all()
            raise

    def _recover_all(self) -> None:
        while self._recoveries:
            self._recoveries[0]()
            del self._recoveries[0]
