"""The recurrent part of one sequence's KV.

A recurrent layer replaces its state with every token, so rejected tokens cannot be cut off. Here
no state is replaced before it is certain: a `Snapshot` has the states of all layers after some
committed tokens, and for every later token there is what it feeds to the layers. A pass applies the
tokens that were committed since, in the operations and order of one token per pass, and goes
through the tree from there. So a rollback to the snapshot or later recomputes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from backends.recurrent.kinds import Rows, State

Place: TypeAlias = tuple[int, int]
"""(layer, number of the recurrence within it)"""


SNAPSHOTS = 5
"""Snapshots for each sequence that may run at a time: of the one that runs its base, the next base
during a pass, and its checkpoint; of one that has finished and is cached, base and checkpoint."""


@dataclass(frozen=True)
class Snapshot:
    """States of all layers after the first `num_tokens` tokens; without any, before the first."""

    num_tokens: int = 0
    states: Mapping[Place, State] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        return sum(state.nbytes for state in self.states.values())


@dataclass(frozen=True)
class FedToken:
    """Inputs of one token to the recurrences: row `index` of the inputs of its pass."""

    inputs: Mapping[Place, Rows]
    index: int

    def rows(self, place: Place) -> Rows:
        return tuple(x[self.index : self.index + 1] for x in self.inputs[place])


class RecurrentStates:
    """A sequence's snapshots, and the tokens after the last one.

    Attributes:
        base: the snapshot that passes start from.
        checkpoint: the snapshot at the end of the last prefilled chunk, to which a later prompt can
            return.
        fed: the tokens after `base`, in the order of the node table: committed ones, then nodes.
    """

    def __init__(self) -> None:
        self.base = self.checkpoint = Snapshot()
        self.fed: list[FedToken] = []

    def restorable(self, length: int) -> int:
        """Return the largest length of at most `length` that `rollback` can return to."""
        if length >= self.base.num_tokens:
            return length
        return self.checkpoint.num_tokens if length >= self.checkpoint.num_tokens else 0

    def rollback(self, length: int) -> None:
        """Return to a `restorable` length of committed tokens."""
        if length < self.base.num_tokens:
            is_kept = length == self.checkpoint.num_tokens
            self.base = self.checkpoint = self.checkpoint if is_kept else Snapshot()
            self.fed = []
        del self.fed[length - self.base.num_tokens :]

    def select(self, num_committed: int, order: list[int]) -> None:
        """Keep the first `num_committed` tokens, and of the others these, in this order."""
        first = num_committed - self.base.num_tokens
        live = self.fed[first:]
        self.fed[first:] = [live[index] for index in order]

    def fork(self, length: int) -> RecurrentStates:
        """Return the states of another sequence with the first tokens, of a `restorable` length."""
        other = RecurrentStates()
        other.base, other.checkpoint, other.fed = self.base, self.checkpoint, list(self.fed)
        other.rollback(length)
        return other
