"""SequenceStore: one sequence's KV in a backend. NewTokens: the tokens that a pass adds to it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from backends.contract.nodes import NodeTable
from backends.contract.sequence import NO_HIDDEN_STATES


class SequenceStore(Protocol):
    """KV of one sequence and the table of its nodes; operations are those of SequenceKV."""

    table: NodeTable
    """The committed prefix and the live nodes."""

    def add(self, parents: Sequence[int], token_ids: Sequence[int]) -> list[int]:
        """Add nodes that the next pass is to compute; return their ids."""

    def append(self, token_ids: Sequence[int]) -> None:
        """Append tokens whose KV a pass has computed to the committed prefix."""

    def commit(self, path: Sequence[int], keep: Collection[int] = ()) -> None: ...

    def prune(self, nodes: Collection[int]) -> None: ...

    def restorable(self, length: int) -> int: ...

    @property
    def snapshot_lengths(self) -> Sequence[int]: ...

    def rollback(self, length: int) -> None: ...

    def abort(self, n_intact: int | None = None) -> None:
        """Drop every live node, and whatever a failed pass left after the prefix.

        n_intact: committed tokens that the failed operation did not touch; None: all.
        """

    def close(self) -> None:
        """Drop everything but the next node id."""

    def check_integrity(self) -> None:
        """Raise RuntimeError if the cache and the table disagree."""


Store = TypeVar("Store", bound=SequenceStore)


@dataclass(frozen=True)
class NewTokens(Generic[Store]):
    """Tokens of one sequence in a pass: a prefill chunk, or nodes that its table has."""

    store: Store
    token_ids: Sequence[int]
    logits_at: list[int]
    """Positions within `token_ids` to return logits of."""
    are_nodes: bool
    hidden_states_at: Sequence[int] = ()
    hidden_states: np.ndarray | None = None
    """See SequenceInput."""
    context: Store | None = None
    """Another backend's sequence whose prefix these tokens attend to; see SequenceInput."""

    @property
    def n_live_before(self) -> int:
        """Live nodes whose KV is in the cache already."""
        return len(self.store.table) - len(self.token_ids) if self.are_nodes else 0


class PassOutput(NamedTuple):
    """Results of a pass for one sequence."""

    logits: np.ndarray
    """float32 [n_logits, vocab]."""
    hidden_states: np.ndarray = NO_HIDDEN_STATES
    """float32 [len(hidden_states_at), width]."""
