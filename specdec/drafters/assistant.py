"""AssistantDrafter: a head that attends to the target's own KV grows a tree (Gemma 4's assistants).

The head computes a token from the target's hidden state of the token before it and the target's
keys and values of the context. It has no cache, so nothing is computed before it can draft:

    context        t0  t1  t2  t3          t3 is pending: the tree's root
    target's KV    t0  t1  t2              seen by the root and by all nodes below it
    head           t3 with h2 -> root's children;    child with the root's own output -> ...

No node sees another one: what it knows of its path is its parent's output. So every node is run as
a child of the head's empty prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from backends.contract.backend import PREFIX
from backends.contract.sequence import SequenceInput, SequenceKV
from specdec.drafters.candidates import Candidates
from specdec.drafters.frontier import Level
from specdec.drafters.grown_tree import GrownTree
from specdec.drafters.head import HeadDrafter


class AssistantDrafter(HeadDrafter):
    """Drafter with a head whose backend `attends_to_target` (see the module's docstring)."""

    max_hidden_states = 1
    _target_kv: SequenceKV | None = None

    def take_hidden_states(self, position: int, states: NDArray[np.float32]) -> None:
        self._states.add(position, states)
        self._states.keep_last(1)

    def take_kv(self, kv: SequenceKV) -> None:
        self._target_kv = kv

    def num_uncomputed(self, context_ids: Sequence[int]) -> int:
        return 1  # the pending token, whatever the context

    def reset(self) -> None:
        super().reset()
        self._states.clear()
        self._target_kv = None

    def _view(self, context_ids: Sequence[int]) -> list[int]:
        """Return the pending token; nothing if the target's state or KV before it is lacking."""
        n_known, kv = len(context_ids) - 1, self._target_kv
        has_state = len(self._states) == 1 and self._states.end == n_known
        if (
            not has_state
            or kv is None
            or kv.n_committed != n_known - self._window.n_hidden(n_known + 1)
        ):
            return []
        return list(context_ids[-1:])

    def _context_input(self, token_ids: Sequence[int]) -> SequenceInput:
        return self._input(token_ids, self._states.stacked())

    def _nodes_input(self, level: Level, parents: Sequence[int]) -> SequenceInput:
        states = [parent.hidden_state for parent, _ in level]
        given = np.stack([state for state in states if state is not None])
        return self._input([node.token_id for _, node in level], given)

    def _input(self, token_ids: Sequence[int], states: NDArray[np.float32]) -> SequenceInput:
        return SequenceInput(
            self._sequence,
            token_ids,
            [PREFIX] * len(token_ids),
            hidden_states=states,
            hidden_states_at=range(len(token_ids)),
            context=self._target_kv,
        )

    def _new_tree(self, context_ids: Sequence[int], candidates: Candidates) -> GrownTree:
        self._sequence.commit([])  # the root was run as a node
        return super()._new_tree(context_ids, candidates)
