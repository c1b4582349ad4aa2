"""Several texts in one pass: sequences of a backend, and what a pass adds to each.

    backend.run([SequenceRows(a, tokens), SequenceRows(b, tokens, parents), ...])

is one read of the model for all of them, whose cost is that of its rows together. A sequence is one
text: a committed prefix and live nodes below it (see Text). One text is a batch of one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backends.contract.backend import Text


class TokenSequence(Text):
    """One text of a backend that may hold several.

    What fails in a pass drops every live node of each of its sequences.
    """

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
