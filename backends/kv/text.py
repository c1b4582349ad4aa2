"""The sequences of the torch backend."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from backends.contract.backend import BackendError
from backends.contract.sequence import SequenceRows, SequenceScores, TokenSequence
from backends.kv.sequence import SequenceKv


class Runner(Protocol):
    """The backend, as far as its sequences use it (see TorchBackend)."""

    def run(self, batch: Sequence[SequenceRows]) -> list[SequenceScores]: ...

    def mend(
        self,
        sequences: Sequence[TorchSequence],
        operation: Callable[[], None],
        n_intact: int | None = None,
    ) -> None: ...


class TorchSequence(TokenSequence):
    """One text of a TorchBackend."""

    def __init__(self, backend: Runner, kv: SequenceKv) -> None:
        self.backend, self.kv = backend, kv
        self.is_closed = False

    @property
    def committed_ids(self) -> Sequence[int]:
        return self.kv.table.committed

    @property
    def next_node_id(self) -> int:
        return self.kv.table.next_id

    def run(self, rows: SequenceRows) -> SequenceScores:
        return self.backend.run([rows])[0]

    def commit(self, path: Sequence[int], keep: Collection[int] = ()) -> None:
        self._open()
        self.backend.mend([self], lambda: self.kv.commit(path, keep))

    def prune(self, nodes: Collection[int]) -> None:
        self._open()
        self.backend.mend([self], lambda: self.kv.prune(nodes))

    def rollback(self, length: int) -> None:
        self._open()
        n_intact = length if 0 <= length <= self.n_committed else None
        self.backend.mend([self], lambda: self.kv.rollback(length), n_intact)

    def fork(self, length: int | None = None) -> TorchSequence:
        self._open()
        return TorchSequence(self.backend, self.kv.fork(length))

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.kv.close()

    def _open(self) -> None:
        if self.is_closed:
            raise BackendError("the sequence is closed: begin another one")
