"""Storage of one sequence's KV in a backend, and the tokens that a pass adds to it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from backends.contract.nodes import NodeTable


class SequenceStore(Protocol):
    """KV of one sequence in step with its table; operations are those of SequenceKV."""

    table: NodeTable
    """The committed prefix and the live nodes."""

    def add(self, parents: Sequence[int], token_ids: Sequence[int]) -> list[int]:
        """Nodes that the next pass is to compute; their ids."""

    def append(self, token_ids: Sequence[int]) -> None:
        """A pass has computed the KV of these tokens: they are the end of the prefix."""

    def commit(self, path: Sequence[int], keep: Collection[int] = ()) -> None: ...

    def prune(self, nodes: Collection[int]) -> None: ...

    def rollback(self, length: int) -> None: ...

    def abort(self, n_intact: int | None = None) -> None:
        """Drop every live node, and what a broken pass left behind the prefix.

        n_intact: committed tokens that an operation left alone that broke off; None: all.
        """

    def close(self) -> None:
        """Drop everything; the next node id stays."""

    def check_integrity(self) -> None:
        """Raise RuntimeError where the cache does not hold what the table says."""


Store = TypeVar("Store", bound=SequenceStore)


@dataclass(frozen=True)
class NewTokens(Generic[Store]):
    """Tokens of one sequence in a pass: the next ones of a prompt, or nodes that its table has."""

    store: Store
    token_ids: Sequence[int]
    logits_at: list[int]
    """Positions within them whose logits are wanted."""
    are_nodes: bool

    @property
    def n_live_before(self) -> int:
        """Live nodes that the cache has rows of already."""
        return len(self.store.table) - len(self.token_ids) if self.are_nodes else 0
