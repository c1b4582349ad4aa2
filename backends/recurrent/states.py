"""The recurrent part of one sequence's KV.

A recurrent layer replaces its state with every token, so rejected tokens cannot be cut off. Here
no state is replaced before it is certain: a `Snapshot` has the states of all layers after some
committed tokens, and for every later token there is what it feeds to the layers. A pass applies the
tokens that were committed since, in the operations and order of one token per pass, and goes
through the tree from there. So a rollback to the snapshot or later recomputes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from backends.recurrent.kinds import Rows, State

Place: TypeAlias = tuple[int, int]
"""(layer, number of the recurrence within it)"""


SNAPSHOTS = 6
"""Snapshots for each sequence that may run at a time: its base and checkpoint, the next ones of a
pass over a part of its prompt, and base and checkpoint of a cached sequence."""
TAIL_TOKENS = 16
"""Last tokens of a prompt whose inputs are kept after its checkpoint: a chat's next turn may go on
without the last ones, which begin the answer (a role, an empty thought)."""
MAX_TAIL_TOKENS = 2 * TAIL_TOKENS
_MAX_PASSES = 2
"""Passes whose nodes a draft tree is made of: the last one, and one whose subtree was kept."""


@dataclass(frozen=True)
class Snapshot:
    """States of all layers after the first `num_tokens` tokens; without any, before the first."""

    num_tokens: int = 0
    states: Mapping[Place, State] = field(default_factory=dict)


@dataclass(frozen=True)
class FedToken:
    """Inputs of one token to the recurrences: row `index` of the inputs of its pass."""

    inputs: Mapping[Place, Rows]
    index: int

    def rows(self, place: Place) -> Rows:
        return tuple(x[self.index : self.index + 1] for x in self.inputs[place])

    @property
    def num_tokens_of_pass(self) -> int:
        return max((len(rows[0]) for rows in self.inputs.values()), default=0)

    def is_at(self, index: int, num_tokens: int) -> bool:
        """Return whether it is the token `index` of inputs of `num_tokens`."""
        return self.index == index and self.num_tokens_of_pass == num_tokens


class RecurrentStates:
    """A sequence's snapshots, and the tokens after them.

    Attributes:
        base: the snapshot that passes start from.
        fed: the tokens after `base`, in the order of the node table: committed ones, then nodes.
        checkpoint: a snapshot near the end of the last prompt, to which a later one can return.
        tail: the prompt's tokens after `checkpoint`.
        num_to_make: maximum number of snapshots that its next pass makes: at a checkpoint and at
            its end; none once it has finished.
    """

    def __init__(self) -> None:
        self.base = self.checkpoint = Snapshot()
        self.fed: list[FedToken] = []
        self.tail: list[FedToken] = []
        self.num_to_make = 2

    @property
    def end_of_prompt(self) -> int:
        """Length of the last prompt."""
        return self.checkpoint.num_tokens + len(self.tail)

    def restorable(self, length: int) -> int:
        """Return the largest length of at most `length` that `rollback` can return to."""
        if length >= self.base.num_tokens:
            return length
        return min(length, self.end_of_prompt) if length >= self.checkpoint.num_tokens else 0

    def rollback(self, length: int) -> None:
        """Return to a `restorable` length of committed tokens."""
        if length < self.base.num_tokens:
            if length < self.checkpoint.num_tokens:
                self.checkpoint, self.tail = Snapshot(), []
            self.base, self.fed = self.checkpoint, list(self.tail)
        del self.fed[length - self.base.num_tokens :]
        if length < self.end_of_prompt:
            del self.tail[max(0, length - self.checkpoint.num_tokens) :]

    def select(self, num_committed: int, order: list[int]) -> None:
        """Keep the first `num_committed` tokens, and of the others these, in this order."""
        first = num_committed - self.base.num_tokens
        live = self.fed[first:]
        self.fed[first:] = [live[index] for index in order]
        self._compact_many()

    def fork(self, length: int) -> RecurrentStates:
        """Return the states of another sequence with the first tokens, of a `restorable` length."""
        other = RecurrentStates()
        other.base, other.checkpoint = self.base, self.checkpoint
        other.fed, other.tail = list(self.fed), list(self.tail)
        other.rollback(length)
        return other

    def rest(self) -> None:
        """Take less memory, because the sequence has finished: its next pass will be a fork's."""
        self.num_to_make = 0
        self.compact()

    def compact(self) -> None:
        """Keep the inputs of the tokens after `base` alone, without those of dropped nodes."""
        if all(item.is_at(index, len(self.fed)) for index, item in enumerate(self.fed)):
            return
        inputs = {
            place: joined([item.rows(place) for item in self.fed])
            for place in (self.fed[0].inputs if self.fed else ())
        }
        self.fed = [FedToken(inputs, index) for index in range(len(self.fed))]

    def _compact_many(self) -> None:
        """Compact nodes of many passes (beams), most of which have been dropped."""
        passes = {id(item.inputs): item for item in self.fed}
        if len(passes) > _MAX_PASSES:
            num_tokens = sum(item.num_tokens_of_pass for item in passes.values())
            if num_tokens > 2 * len(self.fed):
                self.compact()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensors that are kept; shared ones several times."""
        for snapshot in (self.base, self.checkpoint):
            yield from snapshot.states.values()
        for inputs in {id(x.inputs): x.inputs for x in (*self.fed, *self.tail)}.values():
            for rows in inputs.values():
                yield from rows


def joined(rows: Sequence[Rows]) -> Rows:
    """Return rows that follow each other as one, in memory of their own."""
    return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))
