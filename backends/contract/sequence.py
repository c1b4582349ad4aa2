"""Several texts in one pass: sequences of a backend, and what a pass adds to each.

    backend.run([SequenceRows(a, tokens), SequenceRows(b, tokens, parents), ...])

is one read of the model for all of them, whose cost is that of its rows together. A sequence is one
text: a committed prefix and live nodes below it (see Text). One text is a batch of one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from offload.formats.mapped import TensorShape

SavedTensors = Mapping[str, tuple[TensorShape, memoryview]]
"""Tensors by name, each with its bytes, which may be written to."""


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix of two sequences of tokens."""
    n_tokens = min(len(first), len(second))
    if first[:n_tokens] == second[:n_tokens]:  # usual, and quick
        return n_tokens
    pairs = zip(first, second, strict=False)
    return next(i for i, (one, other) in enumerate(pairs) if one != other)


class Text(ABC):
    """The KV of one text: a committed prefix of `n_committed` tokens plus any number of live
    tentative nodes, which form a forest below the prefix.

    Node ids are consecutive integers that are never used twice; the next call of `extend` gives
    `next_node_id` to its first node, so that a batch can name parents inside itself.

    An error or a cancel in any method leaves the committed prefix as it was before the call
    and drops every live node.
    """

    @property
    @abstractmethod
    def committed_ids(self) -> Sequence[int]:
        """The tokens whose KV is the committed prefix; exact at all times, not to be changed."""

    @property
    def n_committed(self) -> int:
        """Length of the committed prefix."""
        return len(self.committed_ids)

    @property
    @abstractmethod
    def next_node_id(self) -> int:
        """The id that the first node of the next `extend` will get."""

    @property
    @abstractmethod
    def node_room(self) -> int:
        """Live nodes that a pass may add now, beside those that are live in this and other texts
        of the backend; how deep they may lie is `max_context`'s."""

    @abstractmethod
    def prefill(self, token_ids: Sequence[int]) -> np.ndarray:
        """Append `token_ids` to the committed prefix; return the last one's logits [vocab].

        Costs one read of the model however long the prompt is. Live nodes are dropped.
        Raises ContextFull when the tokens do not fit.
        """

    @abstractmethod
    def extend(
        self, token_ids: Sequence[int], parents: Sequence[int], rows: Sequence[int] | None = None
    ) -> tuple[list[int], np.ndarray]:
        """Score n tentative nodes in one pass.

        parents [n]: PREFIX, a live node's id, or the id of an earlier node of this call.
        rows: positions within this call whose logits are wanted (all when None).
        Returns, when the pass is over, the n new ids and float32 logits [len(rows) or n, vocab].
        """

    @abstractmethod
    def commit(self, path: Sequence[int], keep: Collection[int] = ()) -> None:
        """Make the KV of `path` (a chain of live nodes from the prefix down) part of the prefix.

        The subtrees rooted at the nodes in `keep`, children of the path's end, stay live; every
        other node is dropped. Nothing is recomputed.
        """

    @abstractmethod
    def prune(self, nodes: Collection[int]) -> None:
        """Drop these live nodes and all nodes below them."""

    @abstractmethod
    def rollback(self, length: int) -> None:
        """Cut the committed prefix to `length` tokens (absolute) and drop all live nodes."""

    def cut_to(self, token_ids: Sequence[int]) -> list[int]:
        """Cut the committed prefix to the beginning that it shares with these tokens, the last one
        left out; those of them that it then lacks."""
        wanted = list(token_ids)
        n_kept = common_length(list(self.committed_ids), wanted[:-1])
        if n_kept < self.n_committed:
            self.rollback(n_kept)
        return wanted[n_kept:]

    @abstractmethod
    def prefix_tensors(self) -> tuple[TensorShape, ...]:
        """The tensors that hold the KV of the committed prefix. Live nodes are dropped."""

    @abstractmethod
    def save_prefix(self, buffers: Mapping[str, memoryview]) -> None:
        """Write the tensors of `prefix_tensors` into the buffers of their names.

        Takes no memory beside the buffers.
        """

    @abstractmethod
    def load_prefix(self, token_ids: Sequence[int], tensors: SavedTensors) -> None:
        """Make `token_ids` the committed prefix, with the KV that `save_prefix` wrote for it.

        Raises BackendError where the tensors are not those of such a prefix of this model; the
        text is empty then.
        """


class Passes(Protocol):
    """What runs sequences together: their backend."""

    def run(self, batch: Sequence[SequenceRows]) -> list[SequenceScores]:
        """See Backend.run."""

    def n_fitting(self, batch: Sequence[SequenceRows]) -> int:
        """See Backend.n_fitting."""


class TokenSequence(Text):
    """One text of a backend that may hold several.

    What fails in a pass drops every live node of each of its sequences.
    """

    backend: Passes

    def rows_to(self, token_ids: Sequence[int]) -> SequenceRows:
        """What makes `token_ids` the committed prefix, keeping the KV of what they share."""
        return SequenceRows(self, self.cut_to(token_ids))

    @abstractmethod
    def run(self, rows: SequenceRows) -> SequenceScores:
        """A pass of this sequence alone."""

    def prefill(self, token_ids: Sequence[int]) -> np.ndarray:
        row: np.ndarray = self.run(SequenceRows(self, token_ids)).logits[0]
        return row

    def extend(
        self, token_ids: Sequence[int], parents: Sequence[int], rows: Sequence[int] | None = None
    ) -> tuple[list[int], np.ndarray]:
        found = self.run(SequenceRows(self, token_ids, parents, rows))
        return found.node_ids, found.logits

    @abstractmethod
    def fork(self, length: int | None = None) -> TokenSequence:
        """A sequence that begins with the first `length` committed tokens (None: all), whose KV
        both hold once until one of them changes it."""

    @abstractmethod
    def close(self) -> None:
        """Give its KV back. Idempotent."""


@dataclass(frozen=True)
class SequenceRows:
    """What a pass adds to one sequence.

    parents: None appends `token_ids` to the committed prefix, as a part of a prompt; [n] adds
        tentative nodes: PREFIX, a live node's id, or the id of an earlier node of these.
    rows: positions within `token_ids` whose logits are wanted; None: all of nodes, of a prompt the
        last one.
    """

    sequence: TokenSequence
    token_ids: Sequence[int]
    parents: Sequence[int] | None = None
    rows: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.parents is None and not self.token_ids:
            raise ValueError("prefill needs at least one token")
        if self.parents is not None and len(self.parents) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} tokens have {len(self.parents)} parents")

    @property
    def wanted(self) -> list[int]:
        """The rows whose logits are wanted."""
        if self.rows is not None:
            return list(self.rows)
        n_tokens = len(self.token_ids)
        return [n_tokens - 1] if self.parents is None else list(range(n_tokens))


@dataclass(frozen=True)
class SequenceScores:
    """node_ids [n], empty for a prompt's tokens; logits float32 [wanted, vocab]."""

    node_ids: list[int]
    logits: np.ndarray
