"""HeadDrafter: a draft head that is run repeatedly grows a tree (MTP, EAGLE-3).

The head computes a token from the target's hidden state of the token *before* it. So it begins with
the context's second token, and its cache lags behind the target by one step at most:

    context       t0  t1  t2  t3          t3 is pending: the tree's root
    target         h0  h1  h2
    head              t1  t2  t3          with h0, h1, h2; its logits after t3 are for the root's
                                          children

Below the root, where the target has computed nothing yet, a node is run with the head's own output
for its parent in place of the target's state (EAGLE, Li et al. 2024, section 4.1). Such nodes are
dropped after a step, and the accepted tokens are run again with the target's states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.contract.sequence import SequenceInput, SequenceOutput
from backends.contract.source import MAX_PROMPT_STATES
from specdec.drafters.batched_drafting import DraftSteps
from specdec.drafters.candidates import Candidates
from specdec.drafters.frontier import Level
from specdec.drafters.grown_tree import GrownNode, GrownTree
from specdec.drafters.model import ModelDrafter
from specdec.drafters.state_buffer import StateBuffer
from specdec.verification.acceptance import Acceptance
from specdec.verification.tree import DraftTree


class HeadDrafter(ModelDrafter):
    """Drafter with a head that takes the target's hidden states (see the module's docstring).

    It has no parallel drafting: the tree below an outcome would be grown from the head's own
    outputs, when the target's state is there a moment later.
    """

    max_hidden_states = MAX_PROMPT_STATES
    can_draft_ahead = False
    _can_run_forced = False  # a node's input is its parent's output
    _reuses_prefixes = False  # it may have begun anywhere in its context

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._states = StateBuffer()
        self._begin = 1
        """Position of the first token in the head's cache."""

    def take_hidden_states(self, position: int, states: NDArray[np.float32]) -> None:
        self._states.add(position, states)

    def prefill_in_steps(self, context_ids: Sequence[int], limit: int) -> DraftSteps[None]:
        yield from ()  # the states of these tokens are computed in this very step

    def drafting_ahead(self, tree: DraftTree) -> DraftSteps[None]:
        yield from ()

    def num_uncomputed(self, context_ids: Sequence[int]) -> int:
        return len(self._states)

    def observe(self, acceptance: Acceptance, tree: DraftTree) -> None:
        """Drop the tree: its nodes were run with the head's own outputs."""
        if self._tree is not None:
            self._sequence.commit([])
            self._tree = None

    def reset(self) -> None:
        super().reset()
        self._states.clear()

    def _view(self, context_ids: Sequence[int]) -> list[int]:
        """Return the tokens from `_begin` on; none if the state before the last one is lacking.

        The cache begins anew after a gap, and with the newest states where the head's own context
        is full.
        """
        if self._states.end != len(context_ids) - 1:
            return []
        n_computed = 0 if self._kv is None else self._kv.n_committed
        is_full = n_computed + len(self._states) > self._backend.max_context
        if self._kv is None or self._begin + n_computed != self._states.start + 1 or is_full:
            if n_computed:
                self._sequence.rollback(0)
            self._states.keep_last(max(1, self._backend.max_context // 2))
            self._begin = self._states.start + 1
        return list(context_ids[self._begin :])

    def _context_input(self, token_ids: Sequence[int]) -> SequenceInput:
        return SequenceInput(
            self._sequence,
            token_ids,
            hidden_states=self._states.stacked(),
            hidden_states_at=[len(token_ids) - 1],
        )

    def _nodes_input(self, level: Level, parents: Sequence[int]) -> SequenceInput:
        states = [parent.hidden_state for parent, _ in level]
        return SequenceInput(
            self._sequence,
            [node.token_id for _, node in level],
            parents,
            hidden_states=np.stack([state for state in states if state is not None]),
            hidden_states_at=range(len(level)),
        )

    def _new_tree(self, context_ids: Sequence[int], candidates: Candidates) -> GrownTree:
        self._states.mark_used()
        return super()._new_tree(context_ids, candidates)

    def _note_run(self, nodes: Sequence[GrownNode], output: SequenceOutput) -> None:
        for node, state in zip(nodes, output.hidden_states, strict=True):
            node.hidden_state = state
