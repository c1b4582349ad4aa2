"""One forward pass through the recurrences of all layers, for all of its sequences."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from backends.recurrent.kinds import Recurrence, Rows, State
from backends.recurrent.states import FedToken, Place, RecurrentStates, Snapshot

_thread = threading.local()


@dataclass
class PassPart:
    """One sequence's new tokens in a pass.

    Attributes:
        num_committed: tokens of the committed prefix.
        parents: of the live nodes, old and new: index of the parent among them, -1 for the prefix;
            None for tokens that are appended to the prefix.
        num_new: new tokens; of nodes, the last ones.
    """

    states: RecurrentStates
    num_committed: int
    parents: Sequence[int] | None
    num_new: int
    inputs: dict[Place, Rows] = field(default_factory=dict)
    """Inputs of the new nodes so far: a pass may go through a layer in chunks."""
    at_prefix: dict[Place, State] = field(default_factory=dict)
    """States after the committed prefix, and appended tokens so far."""

    def run(self, place: Place, recurrence: Recurrence, rows: Rows) -> torch.Tensor:
        """Return the outputs of the next rows of its new tokens."""
        if place not in self.at_prefix:
            self.at_prefix[place] = self._state_of_prefix(place, recurrence, rows)
        state = self.at_prefix[place]
        if self.parents is None:
            self.at_prefix[place], output = recurrence.advance(state, rows)
            return output
        before = self.inputs.get(place)
        self.inputs[place] = rows if before is None else _joined([before, rows])
        n_old = len(self.parents) - self.num_new
        live = [item.rows(place) for item in self.states.fed[self._n_pending :]]
        known = _joined([*live, self.inputs[place]])
        n_known = len(known[0])
        requested = list(range(n_known - len(rows[0]), n_known))
        assert n_known - n_old == len(self.inputs[place][0]), "a node's input is missing"
        return torch.cat(recurrence.branch(state, known, self.parents[:n_known], requested))

    @property
    def _n_pending(self) -> int:
        """Number of committed tokens after the snapshot."""
        return self.num_committed - self.states.base.num_tokens

    def _state_of_prefix(self, place: Place, recurrence: Recurrence, rows: Rows) -> State:
        state = self.states.base.states.get(place)
        if state is None:
            state = recurrence.initial(rows)
        pending = [item.rows(place) for item in self.states.fed[: self._n_pending]]
        if pending:
            state, _ = recurrence.advance(state, _joined(pending))
        return state

    def succeed(self) -> None:
        """Take over the states of a pass that has succeeded."""
        states = self.states
        del states.fed[: self._n_pending]
        num_tokens = self.num_committed + (self.num_new if self.parents is None else 0)
        states.base = Snapshot(num_tokens, self.at_prefix)
        if self.parents is None:
            states.checkpoint, states.fed = states.base, []
        else:
            states.fed += [FedToken(self.inputs, index) for index in range(self.num_new)]


class RecurrentPass:
    """The recurrences of one pass.

    Args:
        parts: the sequences in the order of their rows; padding rows may follow.
    """

    def __init__(self, parts: Sequence[PassPart]) -> None:
        self._parts = parts
        self._layer, self._start, self._n_calls = 0, 0, 0

    def begin_layer(self, layer: int, start: int) -> None:
        """Begin the rows from `start` on of a layer."""
        self._layer, self._start, self._n_calls = layer, start, 0

    def next_place(self) -> Place:
        """Return the place of the layer's next recurrence."""
        self._n_calls += 1
        return self._layer, self._n_calls - 1

    def run(self, recurrence: Recurrence, rows: Rows) -> torch.Tensor:
        """Return the outputs of a recurrence for the layer's rows, [tokens, ...]."""
        place = self.next_place()
        outputs = []
        num_rows, first = len(rows[0]), 0
        for part in self._parts:
            a, b = max(first, self._start), min(first + part.num_new, self._start + num_rows)
            first += part.num_new
            if a < b:
                mine = tuple(x[a - self._start : b - self._start] for x in rows)
                outputs.append(part.run(place, recurrence, mine))
        output = torch.cat(outputs) if outputs else None
        n_padding = num_rows - (0 if output is None else len(output))
        if output is None:  # padding rows alone
            _, output = recurrence.advance(recurrence.initial(rows), rows)
        elif n_padding:
            output = torch.cat([output, output.new_zeros(n_padding, *output.shape[1:])])
        return output

    def succeed(self) -> None:
        for part in self._parts:
            part.succeed()


def current_pass() -> RecurrentPass | None:
    """Return the pass that this thread computes."""
    return getattr(_thread, "running", None)


@contextmanager
def running(recurrent: RecurrentPass | None) -> Iterator[None]:
    """Make a pass the one that this thread computes."""
    _thread.running = recurrent
    try:
        yield
    finally:
        _thread.running = None


def _joined(rows: Sequence[Rows]) -> Rows:
    if len(rows) == 1:
        return rows[0]
    return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))
