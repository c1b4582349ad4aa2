"""Several texts in one pass: sequences of a backend, and what a pass adds to each.

    backend.run([SequenceRows(a, tokens), SequenceRows(b, tokens, parents), ...])

is one read of the model for all of them, whose cost is that of its rows together. A sequence is one
text: a committed prefix and live nodes below it, as for `Backend`. One text is a batch of one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from backends.contract.backend import common_length


class TokenSequence(ABC):
    """One text of a backend and its KV.

    An error or a cancel in a pass drops every live node of each of its sequences; committed
    prefixes stay as they were before it.
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
        """The id that its first node of the next pass will get."""

    @abstractmethod
    def run(self, rows: SequenceRows) -> SequenceScores:
        """A pass of this sequence alone."""

    def prefill(self, token_ids: Sequence[int]) -> np.ndarray:
        """Append `token_ids` to the committed prefix; the last one's logits [vocab]."""
        row: np.ndarray = self.run(SequenceRows(self, token_ids)).logits[0]
        return row

    def prefill_from(self, token_ids: Sequence[int]) -> tuple[int, np.ndarray]:
        """Make `token_ids` the committed prefix, keeping the KV of the beginning they share.

        Returns the number of tokens whose KV was kept, and the last one's logits [vocab].
        """
        wanted = list(token_ids)
        n_kept = common_length(list(self.committed_ids), wanted[:-1])
        if n_kept < self.n_committed:
            self.rollback(n_kept)
        return n_kept, self.prefill(wanted[n_kept:])

    def extend(
        self, token_ids: Sequence[int], parents: Sequence[int], rows: Sequence[int] | None = None
    ) -> tuple[list[int], np.ndarray]:
        """Score n tentative nodes; see SequenceRows. Returns their ids and the logits."""
        found = self.run(SequenceRows(self, token_ids, parents, rows))
        return found.node_ids, found.logits

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
