"""What both backends share: the frame of their operations, and what follows one that broke off."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeVar

import numpy as np

from backends.contract.backend import Backend, BackendError, ContextFull
from backends.contract.nodes import NodeTable
from offload.process.interruptible import uninterrupted

_T = TypeVar("_T")


class NodeCache(Protocol):
    """A KV cache in step with its table; operations are the contract's (see Backend)."""

    table: NodeTable
    """The committed prefix and the live nodes."""

    def append(self, token_ids: Sequence[int]) -> None:
        """A pass has computed the KV of these tokens: they are the end of the prefix."""

    def commit(self, path: Sequence[int], keep: Collection[int] = ()) -> None: ...

    def prune(self, nodes: Collection[int]) -> None: ...

    def rollback(self, length: int) -> None: ...

    def abort(self, n_intact: int | None = None) -> None:
        """Drop every live node, and what a broken pass left behind the prefix.

        n_intact: committed tokens that an operation left alone that broke off; None: all.
        """

    def check_integrity(self) -> None:
        """Raise RuntimeError where the cache does not hold what the table says."""


class MendingBackend(Backend):
    """A backend whose operations are repaired where an error cuts them short.

    Ctrl-C does not: it waits for a place where the operation can be given up, or for its end.
    """

    _is_closed = False

    @property
    @abstractmethod
    def _kv(self) -> NodeCache: ...

    @property
    def committed_ids(self) -> Sequence[int]:
        return self._kv.table.committed

    @property
    def next_node_id(self) -> int:
        return self._kv.table.next_id

    def prefill(self, token_ids: Sequence[int]) -> np.ndarray:
        if not token_ids:
            raise ValueError("prefill needs at least one token")

        def append() -> np.ndarray:
            self._kv.abort()
            self._check_context(len(token_ids), len(token_ids))
            row = self._run_prompt(token_ids)
            self._kv.append(token_ids)
            return row

        return self._mending(append)

    def extend(
        self, token_ids: Sequence[int], parents: Sequence[int], rows: Sequence[int] | None = None
    ) -> tuple[list[int], np.ndarray]:
        if len(token_ids) != len(parents):
            raise ValueError(f"{len(token_ids)} tokens have {len(parents)} parents")
        if not token_ids:
            return [], np.zeros((0, self.vocab_size), dtype=np.float32)
        wanted = list(range(len(token_ids)) if rows is None else rows)

        def grow() -> tuple[list[int], np.ndarray]:
            self._check_nodes(len(self._kv.table) + len(token_ids))
            found = self._run_nodes(token_ids, parents, wanted)
            self._kv.check_integrity()
            return found

        return self._mending(grow)

    def commit(self, path: Sequence[int], keep: Collection[int] = ()) -> None:
        self._mending(lambda: self._kv.commit(path, keep))

    def prune(self, nodes: Collection[int]) -> None:
        self._mending(lambda: self._kv.prune(nodes))

    def rollback(self, length: int) -> None:
        n_intact = length if 0 <= length <= self.n_committed else None
        self._mending(lambda: self._kv.rollback(length), n_intact)

    @abstractmethod
    def _run_prompt(self, token_ids: Sequence[int]) -> np.ndarray:
        """Add the KV of these tokens, which fit; the last one's logits [vocab]."""

    @abstractmethod
    def _run_nodes(
        self, token_ids: Sequence[int], parents: Sequence[int], rows: list[int]
    ) -> tuple[list[int], np.ndarray]:
        """Add these nodes and their KV; their ids, and logits [len(rows), vocab]."""

    def _check_nodes(self, n_nodes: int) -> None:
        if self.max_nodes is not None and n_nodes > self.max_nodes:
            raise BackendError(
                f"{n_nodes} live nodes are more than the {self.max_nodes} that this "
                "backend was made for: draft fewer tokens or raise max_nodes"
            )

    def _check_context(self, depth: int, n_tokens: int) -> None:
        """Raise ContextFull where `n_tokens` new ones lead to that many after the prefix."""
        if self.n_committed + depth > self.max_context:
            raise ContextFull(n_tokens, self.n_committed, self.max_context)

    @abstractmethod
    def _repair(self, n_intact: int) -> None:
        """Cut the cache to `n_intact` tokens, drop live nodes, let a ring begin at layer 0."""

    def _mending(self, operation: Callable[[], _T], n_intact: int | None = None) -> _T:
        """Call `operation`; after any failure, leave what the contract says.

        Args:
            n_intact: committed tokens that the operation leaves alone; None: all.
        """
        length = self.n_committed if n_intact is None else n_intact
        return self._repaired(operation, lambda: self._repair(length))

    @uninterrupted
    def _repaired(self, operation: Callable[[], _T], repair: Callable[[], None]) -> _T:
        """Call `operation`, and `repair` after any failure."""
        if self._is_closed:
            raise BackendError("the backend is closed; load the model again")
        try:
            return operation()
        except BaseException:
            if not self._is_closed:  # by a signal handler: what would be mended is freed
                repair()
            raise
