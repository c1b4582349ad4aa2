"""How large a tree to draft: as many nodes as the pass verifies for free.

A streamed pass takes as long as its reads until the arithmetic of its rows overtakes them
(docs/how-it-works.md). Nodes below that knee cost nothing; above it each one delays the pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.config import SpecConfig
from specdec.drafters.base import TreeLimits
from specdec.drafters.model import MAX_BEAMS

MAX_AUTO_NODES = 128
"""Beyond this the next node of a tree is hardly ever accepted, and its logits take memory."""
_RESIDENT_SLACK = 1.5
"""How much longer than one row's a pass may take where no reads hide the arithmetic."""

ASSUMED_LEVEL_ACCEPTANCE = 0.85
"""Chance that a tree holds the target's next token, before anything is observed."""


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


def level_seconds(draft_cost: PassCost, n_nodes: int) -> float:
    """What one level of a tree of that size costs the draft model, at most."""
    return draft_cost.seconds(min(n_nodes, MAX_BEAMS))


class DraftPolicy:
    """Limits of the next tree.

    Args:
        config: what the user fixed; the rest is chosen here.
        cost: of a pass of the target.
        max_context: tokens that a sequence may have.
        draft_cost: of running one level of a tree through the draft model, if there is one.
        max_nodes: most draft tokens that memory was set aside for.
    """

    def __init__(
        self,
        config: SpecConfig,
        cost: PassCost,
        max_context: int,
        draft_cost: PassCost | None = None,
        max_nodes: int | None = None,
    ) -> None:
        self._config = config
        self._max_context = max_context
        self._has_waiting_passes = draft_cost is not None and cost.read_seconds > 0.0
        if config.num_draft_tokens is not None:
            self._n_nodes = config.num_draft_tokens
        else:
            most = MAX_AUTO_NODES if max_nodes is None else max_nodes
            self._n_nodes = min(cost.free_rows() - 1, MAX_AUTO_NODES, most)
        self._depth = self._choose_depth(cost, draft_cost)

    @property
    def n_nodes(self) -> int:
        """Draft tokens of a tree when nothing else bounds it."""
        return self._n_nodes

    @property
    def depth(self) -> int:
        """Levels of a tree when nothing else bounds it."""
        return self._depth

    def limits(self, context_length: int, max_tokens: int, node_room: int) -> TreeLimits:
        """For a context of that many tokens, pending one included, and the tokens still wanted.

        node_room: nodes that the target can take now, the pending token's among them.

        The last token wanted is never drafted: the target emits it itself.
        """
        room = self._max_context - context_length
        most = max(0, min(room, max_tokens - 1))
        return TreeLimits(
            min(self._n_nodes, node_room - 1),
            min(self._depth, most),
            self._config.width,
            # The next tree begins at the latest one level below this one's last.
            max_ahead_depth=min(2 * self._depth + 1, most),
        )

    def should_draft_ahead(self) -> bool:
        """Whether the next pass runs with the drafter at work beside it.

        "auto": where a draft model can use the time that passes wait for storage.
        """
        if self._config.draft_ahead == "auto":
            return self._has_waiting_passes
        return self._config.draft_ahead == "on"

    def _choose_depth(self, cost: PassCost, draft_cost: PassCost | None) -> int:
        """The depth with the best expected tokens per second, drafting before each pass.

        A level that is reached with probability a^d costs one run of the draft (Leviathan et al.
        2023, theorem 3.8, with a tree's acceptance for a).
        """
        if self._config.draft_depth is not None or draft_cost is None:
            return self._config.depth
        pass_seconds = cost.seconds(1 + self._n_nodes)
        per_level = level_seconds(draft_cost, self._n_nodes)

        def rate(depth: int) -> float:
            tokens = sum(ASSUMED_LEVEL_ACCEPTANCE**level for level in range(depth + 1))
            return tokens / (pass_seconds + depth * per_level)

        return max(range(1, self._config.depth + 1), key=rate)
