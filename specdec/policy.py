"""How large a tree to draft: as many nodes as the pass verifies for free.

A streamed pass takes as long as its reads until the arithmetic of its rows overtakes them
(docs/how-it-works.md). Nodes below that knee cost nothing; above it each one delays the pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.config import SpecConfig
from specdec.drafters.base import TreeLimits

MAX_AUTO_NODES = 128
"""Beyond this the next node of a tree is hardly ever accepted, and its logits take memory."""
_RESIDENT_SLACK = 1.5
"""How much longer than one row's a pass may take where no reads hide the arithmetic."""


@dataclass(frozen=True)
class PassCost:
    """Seconds of one target pass as a function of its rows."""

    read_seconds: float
    row_free_seconds: float
    """Arithmetic of a pass that does not depend on the number of rows."""
    seconds_per_row: float

    def seconds(self, n_rows: int) -> float:
        return max(self.read_seconds, self.row_free_seconds + self.seconds_per_row * n_rows)

    def free_rows(self) -> int:
        """Most rows whose arithmetic hides behind the reads (or within the slack)."""
        one_row = self.row_free_seconds + self.seconds_per_row
        allowed = max(self.read_seconds, _RESIDENT_SLACK * one_row)
        return max(1, int((allowed - self.row_free_seconds) / self.seconds_per_row))


class DraftPolicy:
    """Limits of the next tree."""

    def __init__(self, config: SpecConfig, cost: PassCost, max_context: int) -> None:
        self._config = config
        self._max_context = max_context
        if config.num_draft_tokens is not None:
            self._n_nodes = config.num_draft_tokens
        else:
            self._n_nodes = min(cost.free_rows() - 1, MAX_AUTO_NODES)

    @property
    def n_nodes(self) -> int:
        """Draft tokens of a tree when nothing else bounds it."""
        return self._n_nodes

    def limits(self, context_length: int, max_tokens: int) -> TreeLimits:
        """For a context of that many tokens, pending one included, and the tokens still wanted.

        The last token wanted is never drafted: the target emits it itself.
        """
        room = self._max_context - context_length
        depth = max(0, min(self._config.depth, room, max_tokens - 1))
        return TreeLimits(self._n_nodes, depth, self._config.width)
