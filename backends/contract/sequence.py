"""One sequence of a backend, and what a forward pass adds to it.

    backend.forward([SequenceInput(a, tokens), SequenceInput(b, tokens, parents), ...])

reads the model once for all of them; the cost is that of all tokens together. A single sequence is
a batch of one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from offload.formats.mapped import TensorShape

SavedTensors = Mapping[str, tuple[TensorShape, memoryview]]
"""Tensors by name, each with its bytes, which are writable."""


NO_HIDDEN_STATES = np.zeros((0, 0), dtype=np.float32)


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two lists of tokens."""
    length, end = 0, min(len(first), len(second))
    if first[:end] == second[:end]:  # the usual case
        return end
    while end - length > 1:  # the first `length` are equal, one of those up to `end` is not
        middle = (length + end) // 2
        if first[length:middle] == second[length:middle]:
            length = middle
        else:
            end = middle
    return length


class ForwardPasses(Protocol):
    """The part of a backend that its sequences use."""

    def forward(self, batch: Sequence[SequenceInput]) -> list[SequenceOutput]:
        """See Backend.forward."""

    def n_fitting(self, batch: Sequence[SequenceInput]) -> int:
        """See Backend.n_fitting."""


class SequenceKV(ABC):
    """KV cache of one sequence: a committed prefix of `n_committed` tokens plus any number of live
    tentative nodes, which form a forest below the prefix.

    Node ids are consecutive integers that are never used twice; the next call of `extend` gives
    `next_node_id` to its first node, so that a batch can name parents inside itself.

    An error or a cancel in any method leaves the committed prefix as it was before the call and
    drops every live node; an error in a forward pass drops those of all sequences in the batch.
    """

    backend: ForwardPasses

    @property
    @abstractmethod
    def committed_ids(self) -> Sequence[int]:
        """The tokens whose KV is the committed prefix; always up to date, read-only."""

    @property
    def n_committed(self) -> int:
        """Length of the committed prefix."""
        return len(self.committed_ids)

    @property
    @abstractmethod
    def next_node_id(self) -> int:
        """Id of the first node of the next `extend`."""

    @property
    @abstractmethod
    def num_free_slots(self) -> int:
        """Live nodes that a pass may add now, given those of all sequences of the backend.

        Their depth is limited by `max_context`.
        """

    def prefill(self, token_ids: Sequence[int]) -> np.ndarray:
        """Append `token_ids` to the committed prefix; return the last one's logits [vocab].

        Reads the model once, however long the prompt is. Drops live nodes.
        Raises ContextFull when the tokens do not fit.
        """
        row: np.ndarray = self.backend.forward([SequenceInput(self, token_ids)])[0].logits[0]
        return row

    def extend(
        self,
        token_ids: Sequence[int],
        parents: Sequence[int],
        logits_at: Sequence[int] | None = None,
    ) -> tuple[list[int], np.ndarray]:
        """Score n tentative nodes in a pass of this sequence alone; see SequenceInput.

        Returns the n new ids and float32 logits [len(logits_at) or n, vocab].
        """
        output = self.backend.forward([SequenceInput(self, token_ids, parents, logits_at)])[0]
        return output.node_ids, output.logits

    @abstractmethod
    def commit(self, path: Sequence[int], keep: Collection[int] = ()) -> None:
        """Make the KV of `path` (a chain of live nodes from the prefix down) part of the prefix.

        The subtrees rooted at the nodes in `keep`, children of the path's end, stay live; every
        other node is dropped. Nothing is recomputed.
        """

    @abstractmethod
    def prune(self, nodes: Collection[int]) -> None:
        """Drop these live nodes and all nodes below them."""

    def restorable(self, length: int) -> int:
        """Return the largest prefix of at most `length` committed tokens that the KV can return to.

        Less than `length` in models with recurrent layers, whose states are kept of few prefixes.
        """
        return length

    @property
    def restorable_ranges(self) -> list[tuple[int, int]]:
        """(first, last) lengths of prefixes that the KV can return to."""
        ranges: list[tuple[int, int]] = []
        for length in range(1, self.n_committed + 1):
            if self.restorable(length) == length:
                if ranges and ranges[-1][1] == length - 1:
                    ranges[-1] = (ranges[-1][0], length)
                else:
                    ranges.append((length, length))
        return ranges

    @property
    def snapshot_lengths(self) -> Sequence[int]:
        """Lengths of the prefixes that need a file each, for all that the KV can return to."""
        return (self.n_committed,)

    @abstractmethod
    def rollback(self, length: int) -> None:
        """Cut the committed prefix to `restorable(length)` tokens and drop all live nodes."""

    def finish(self) -> None:
        """Drop all live nodes, and what only passes need: there are none but those of forks."""
        self.rollback(self.n_committed)

    def cut_to(self, token_ids: Sequence[int]) -> list[int]:
        """Cut the committed prefix to what it shares with these tokens; return the missing ones.

        The last token is always returned: its logits are needed.
        """
        tokens = list(token_ids)
        n_common = common_length(list(self.committed_ids), tokens[:-1])
        if n_common < self.n_committed:
            self.rollback(n_common)
        return tokens[self.n_committed :]

    @abstractmethod
    def prefix_tensors(self) -> tuple[TensorShape, ...]:
        """Return the shapes of the tensors of the committed prefix's KV. Drops live nodes."""

    @abstractmethod
    def save_prefix(self, buffers: Mapping[str, memoryview]) -> None:
        """Write the tensors of `prefix_tensors` into the buffers with their names.

        Allocates no memory.
        """

    @abstractmethod
    def load_prefix(self, token_ids: Sequence[int], tensors: SavedTensors) -> None:
        """Make `token_ids` the committed prefix, with the KV that `save_prefix` wrote for it.

        Raises BackendError, and leaves the sequence empty, if the tensors are not those of such a
        prefix of this model.
        """

    @abstractmethod
    def fork(self, length: int | None = None) -> SequenceKV:
        """Return a sequence that begins with the first `restorable(length)` committed tokens
        (None: all).

        The two share its KV until one of them changes it (copy on write).
        """

    @abstractmethod
    def close(self) -> None:
        """Free the KV. Idempotent."""


@dataclass(frozen=True)
class SequenceInput:
    """Tokens that a forward pass computes for one sequence.

    parents: None appends `token_ids` to the committed prefix, as a prefill chunk; [n] adds
        tentative nodes: PREFIX, a live node's id, or the id of an earlier node of this input.
    logits_at: positions within `token_ids` to return logits of; None: all for nodes, the last one
        for a prefill chunk.
    hidden_states_at: positions within `token_ids` to return hidden states of; needs
        `Backend.collect_hidden_states`.
    hidden_states: float32 [n, width]: the target's hidden states that a draft head takes beside
        the tokens; None for other models.
    scored_at: positions within `token_ids`, ascending, whose logits `score` gets in place of the
        caller: a prompt has more of them than memory.
    score: called during the pass with each position and its logits, float32 [vocab], in order; it
        must not keep the row.
    context: the target's KV of the sequence, for a draft head that `attends_to_target`: all tokens
        are at the position after its committed prefix and see that prefix alone, not one another.
        It is only read.
    """

    kv: SequenceKV
    token_ids: Sequence[int]
    parents: Sequence[int] | None = None
    logits_at: Sequence[int] | None = None
    hidden_states_at: Sequence[int] = ()
    hidden_states: np.ndarray | None = None
    context: SequenceKV | None = None
    scored_at: Sequence[int] = ()
    score: Callable[[int, np.ndarray], None] | None = None

    def __post_init__(self) -> None:
        if self.parents is None and not self.token_ids:
            raise ValueError("prefill needs at least one token")
        if self.parents is not None and len(self.parents) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} tokens have {len(self.parents)} parents")
        if self.hidden_states is not None and len(self.hidden_states) != len(self.token_ids):
            n_states = len(self.hidden_states)
            raise ValueError(f"{len(self.token_ids)} tokens have {n_states} hidden states")

    @property
    def logit_positions(self) -> list[int]:
        """Positions within `token_ids` to return logits of."""
        if self.logits_at is not None:
            return list(self.logits_at)
        n_tokens = len(self.token_ids)
        return [n_tokens - 1] if self.parents is None else list(range(n_tokens))


@dataclass(frozen=True)
class SequenceOutput:
    """Node ids [n], empty for a prefill chunk; logits float32 [n_logits, vocab]; hidden states
    float32 [len(hidden_states_at), width]."""

    node_ids: list[int]
    logits: np.ndarray
    hidden_states: np.ndarray = field(default_factory=lambda: NO_HIDDEN_STATES)
