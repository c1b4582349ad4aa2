"""One forward pass through the recurrences of all layers, for all of its sequences."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from backends.recurrent.kinds import Recurrence, Rows, State
from backends.recurrent.states import (
    MAX_TAIL_TOKENS,
    TAIL_TOKENS,
    FedToken,
    Place,
    RecurrentStates,
    Snapshot,
    joined,
)

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
    """Inputs so far of the new nodes, or of the tokens after the checkpoint: a pass may go through
    a layer in chunks."""
    at_prefix: dict[Place, State] = field(default_factory=dict)
    """States after the committed prefix, and appended tokens so far."""
    at_checkpoint: dict[Place, State] = field(default_factory=dict)
    """States at the new checkpoint, of the layers that have reached it."""
    _num_run: dict[Place, int] = field(default_factory=dict)
    """Appended tokens so far."""

    def run(self, place: Place, recurrence: Recurrence, rows: Rows) -> torch.Tensor:
        """Return the outputs of the next rows of its new tokens."""
        if place not in self.at_prefix:
            self.at_prefix[place] = self._state_of_prefix(place, recurrence, rows)
        if self.parents is None:
            return self._append(place, recurrence, rows)
        self._keep(place, rows)
        n_old = len(self.parents) - self.num_new
        live = [item.rows(place) for item in self.states.fed[self._n_pending :]]
        known = _chained([*live, self.inputs[place]])
        n_known = len(known[0])
        requested = list(range(n_known - len(rows[0]), n_known))
        assert n_known - n_old == len(self.inputs[place][0]), "a node's input is missing"
        state = self.at_prefix[place]
        return torch.cat(recurrence.branch(state, known, self.parents[:n_known], requested))

    def _append(self, place: Place, recurrence: Recurrence, rows: Rows) -> torch.Tensor:
        """Advance by a chain, and keep its state at the checkpoint and the inputs after it."""
        first = self._num_run.get(place, 0)
        self._num_run[place] = first + len(rows[0])
        outputs = []
        n_before = min(max(0, self._num_to_checkpoint - first), len(rows[0]))
        if n_before:
            before = tuple(x[:n_before] for x in rows)
            self.at_prefix[place], output = recurrence.advance(self.at_prefix[place], before)
            outputs.append(output)
        if first + n_before == self._num_to_checkpoint and n_before < len(rows[0]):
            self.at_checkpoint.setdefault(place, self.at_prefix[place])
        if n_before < len(rows[0]):
            after = tuple(x[n_before:] for x in rows)
            self._keep(place, after)
            self.at_prefix[place], output = recurrence.advance(self.at_prefix[place], after)
            outputs.append(output)
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _keep(self, place: Place, rows: Rows) -> None:
        before = self.inputs.get(place)
        self.inputs[place] = _owned(rows) if before is None else joined([before, rows])

    @property
    def _num_to_checkpoint(self) -> int:
        """Number of appended tokens before the next checkpoint."""
        return max(0, self.num_new - TAIL_TOKENS)

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
            state, _ = recurrence.advance(state, _chained(pending))
        return state

    def succeed(self) -> None:
        """Take over the states of a pass that has succeeded."""
        states = self.states
        fed = [FedToken(self.inputs, index) for index in range(self._num_kept)]
        states.num_to_make = 1
        if self.parents is not None:
            states.fed = [*states.fed[self._n_pending :], *fed]
            states.base = Snapshot(self.num_committed, self.at_prefix)
            return
        states.base = Snapshot(self.num_committed + self.num_new, self.at_prefix)
        states.fed = []
        tail = [*states.tail, *fed]
        is_next = states.end_of_prompt == self.num_committed
        if is_next and self.num_new < TAIL_TOKENS and len(tail) <= MAX_TAIL_TOKENS:
            states.tail = tail  # a prompt's last chunk may be shorter than its tail
        elif is_next or self.num_new >= TAIL_TOKENS:  # others are parts of an answer
            num_tokens = self.num_committed + self._num_to_checkpoint
            states.checkpoint = Snapshot(num_tokens, self.at_checkpoint if num_tokens else {})
            states.tail = fed

    @property
    def _num_kept(self) -> int:
        """Number of new tokens whose inputs are kept."""
        return self.num_new - (self._num_to_checkpoint if self.parents is None else 0)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that it has made."""
        yield from self.at_prefix.values()
        yield from self.at_checkpoint.values()
        for rows in self.inputs.values():
            yield from rows


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

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that the pass has made."""
        for part in self._parts:
            yield from part.tensors()


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


def _chained(rows: Sequence[Rows]) -> Rows:
    return rows[0] if len(rows) == 1 else joined(rows)


def _owned(rows: Rows) -> Rows:
    """Return rows that are no part of something larger, which would stay in memory with them."""
    return tuple(x.clone() if x.untyped_storage().nbytes() > x.nbytes else x for x in rows)
