"""Memory that the recurrent states of a backend's sequences take, now and after the next pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch

from backends.recurrent.passes import RecurrentPass
from backends.recurrent.states import MAX_TAIL_TOKENS, SNAPSHOTS, RecurrentStates
from backends.recurrent.walks import max_slots

States: TypeAlias = Iterable[RecurrentStates | None]
"""States of sequences; None in a model without recurrent layers."""
_FED_COPIES = 2
"""Passes whose nodes' inputs are kept: of the last one until its accepted path has been applied,
and of the one that runs."""


def planned_bytes(
    n_sequences: int, max_nodes: int, state_bytes: int, fed_bytes: int, largest_bytes: int = 0
) -> int:
    """Return the maximum bytes of `n_sequences` that run at a time and as many cached ones.

    max_nodes: maximum live nodes of all sequences.
    state_bytes, fed_bytes: of the states of one sequence, and of what one token feeds to them.
    largest_bytes: of the largest state, of which the walk through a tree has several.
    """
    # Of each a tail of its prompt; of a cached one the accepted path of its last pass.
    n_kept = n_sequences * (2 * MAX_TAIL_TOKENS + min(max_nodes, MAX_TAIL_TOKENS))
    n_fed = _FED_COPIES * max_nodes + n_kept
    walk_bytes = max_slots(max_nodes) * largest_bytes
    return n_sequences * SNAPSHOTS * state_bytes + n_fed * fed_bytes + walk_bytes


class StateMemory:
    """Memory of the states of a backend's sequences.

    Args:
        state_bytes, fed_bytes, largest_bytes: see `planned_bytes`.
    """

    def __init__(self, state_bytes: int, fed_bytes: int, largest_bytes: int = 0) -> None:
        self._state_bytes, self._fed_bytes = state_bytes, fed_bytes
        self._largest_bytes = largest_bytes
        self._peak_bytes = 0

    def succeed(self, sequences: States, of_pass: RecurrentPass) -> None:
        """Let the states of a pass that has succeeded replace older ones; note the memory before
        that."""
        self._peak_bytes = kept_bytes(sequences, of_pass.tensors())
        of_pass.succeed()

    def growth_bytes(self, sequences: States, max_nodes: int, num_new_seqs: int = 0) -> int:
        """Return the maximum growth in the next pass over nodes, beyond the peak of the last one.

        num_new_seqs: sequences of that pass that have not begun yet.
        """
        states = [*filter(None, sequences), *(RecurrentStates() for _ in range(num_new_seqs))]
        n_snapshots = sum(item.num_to_make for item in states)
        new_bytes = n_snapshots * self._state_bytes + max_nodes * self._fed_bytes
        # The last pass went through a chain at least, with one state.
        walk_bytes = max(0, max_slots(max_nodes) - 1) * self._largest_bytes
        return max(0, kept_bytes(states) + new_bytes - self._peak_bytes) + walk_bytes


def kept_bytes(sequences: States, made: Iterable[torch.Tensor] = ()) -> int:
    """Return the bytes of the states of sequences, which may share memory, and of other tensors."""
    owned = (x for states in sequences if states is not None for x in states.tensors())
    storages = (x.untyped_storage() for x in (*owned, *made))
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())
