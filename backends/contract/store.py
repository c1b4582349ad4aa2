"""SequenceStore: one sequence's KV in a backend. NewTokens: the tokens that a pass adds to it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
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
    scored_at: Sequence[int] = ()
    score: Callable[[int, np.ndarray], None] | None = None
    """See SequenceInput."""

    def with_scored_logits(self) -> NewTokens[Store]:
        """Return the tokens with logits returned where they are scored, too."""
        if not self.scored_at:
            return self
        return replace(self, logits_at=sorted({*self.logits_at, *self.scored_at}))

    def scored(self, output: PassOutput) -> PassOutput:
        """Score the output of `with_scored_logits`; return it with the requested logits alone."""
        if not self.scored_at or self.score is None:
            return output
        places = {at: i for i, at in enumerate(self.with_scored_logits().logits_at)}
        for at in self.scored_at:
            self.score(at, output.logits[places[at]])
        return output._replace(logits=output.logits[[places[at] for at in self.logits_at]])

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
