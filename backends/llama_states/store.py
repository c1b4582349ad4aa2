"""RecurrentStore: one sequence of a llama.cpp model with recurrent layers.

A recurrent layer replaces its state with every token, so llama.cpp cannot cut rejected tokens off.
A pass therefore works on a copy of the state and keeps the original:

    base        the state after the first committed tokens
    live        a copy that has gone on: through the tokens that were committed since (replayed),
                nodes, and padding
    checkpoint  the state after the last prompt, to which a later prompt can return

If all that `live` has gone through is committed, it becomes the base, and so it does where it can
be rolled back to the last committed token (StateInputs, in streamed models). Otherwise the next
pass begins at the base again, with the accepted tokens before its nodes: a few rows more in a pass
that reads the model anyway. A pass that reads it for them alone is due when they are MAX_REPLAYED.

llama.cpp's own rollback (n_rs_seq) would save those rows, but takes a state for every node and
sequence: a 27B's states of 151 MB times 16 nodes are 2.4 GB, as much as 14 % of its Q4_K_M layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from backends.contract.backend import BackendError
from backends.contract.nodes import NodeTable
from backends.llama_states.states import Cell, State, States

MAX_REPLAYED = 16
"""Committed tokens after the base from which on a pass is made for them alone. Extra rows grow with
it, extra reads of the model shrink: with R tokens, a accepted per pass, a read as long as s rows,
a pass takes R / 2 + s * a / R rows more, least at R = sqrt(2 * s * a): 11 for s = 20 and a = 3, 18
for s = 50."""


_PADDING = -1  # no token: a state that has gone through padding is of no use


@dataclass(frozen=True)
class Lane:
    """Tokens after the committed ones that a pass computes in a row."""

    token_ids: list[int]
    places: dict[int, int]
    """Tokens whose logits are requested: index in `token_ids` -> index among the new tokens."""


class RecurrentStore:
    """Committed tokens and live nodes of a sequence, and the states that passes begin from."""

    def __init__(self, states: States) -> None:
        self.table = NodeTable()
        self._states = states
        self._base: State | None = None
        self._live: State | None = None
        self._checkpoint: State | None = None
        self._through: list[int] = []
        """Tokens that `live` has gone through since the base."""
        self._tokens: dict[int, int] = {}  # of live nodes
        self._has_lost = False
        """Whether states after the base were released for other sequences."""
        states.add(self)

    @property
    def num_tokens(self) -> int:
        return self.table.num_tokens

    @property
    def n_base(self) -> int:
        return 0 if self._base is None else len(self._base)

    @property
    def replayed(self) -> list[int]:
        """Committed tokens after the base."""
        return self.table.committed[self.n_base :]

    # --- passes -----------------------------------------------------------------------------

    def add(self, parents: Sequence[int], token_ids: Sequence[int]) -> list[int]:
        ids = self.table.add(parents, token_ids)
        self._tokens.update(zip(ids, map(int, token_ids), strict=True))
        return ids

    def node_lanes(self, n_new: int, logits_at: Collection[int]) -> list[Lane]:
        """Return a lane for each leaf among the last `n_new` nodes."""
        new = self.table.ids[len(self.table) - n_new :]
        inner = {self.table.parents[node] for node in new}
        index = {node: i for i, node in enumerate(new)}
        requested = {new[i] for i in logits_at}
        lanes = []
        for leaf in (node for node in new if node not in inner):
            path = self.table.path(leaf)
            places = {i: index[node] for i, node in enumerate(path) if node in requested}
            requested.difference_update(path)
            lanes.append(Lane([self._tokens[node] for node in path], places))
        return lanes

    def go_on(self, lane: Lane) -> tuple[State, list[int]]:
        """Return a state, and the tokens that it lacks to have gone through the lane."""
        tokens = [*self.replayed, *lane.token_ids]
        n_had, n_replayed = len(self._through), len(tokens) - len(lane.token_ids)
        n_needed = n_replayed + min(lane.places, default=len(lane.token_ids))
        if self._live is None or n_had > n_needed or self._through != tokens[:n_had]:
            self.give_live()
            self._live, n_had = self._states.copied(self._base, self), 0
        return self._live, tokens[n_had:]

    def went(self, token_ids: Sequence[int], n_padding: int) -> None:
        """Record that `live` has gone through these tokens after those before, and padding."""
        assert self._live is not None
        self._states.grow(self._live, len(token_ids) + n_padding)
        self._through += [*token_ids, *[_PADDING] * n_padding]

    # --- commits ----------------------------------------------------------------------------

    def append(self, token_ids: Sequence[int]) -> None:
        """Append a prompt's tokens, which a pass has gone through."""
        self.table.append(token_ids)
        self.promote_live()
        if self.n_base == self.table.n_committed:
            self.give_checkpoint()
            self._checkpoint = self._states.copied(self._base, self)

    def commit(self, path: Sequence[int], keep: Collection[int] = ()) -> None:
        self.table.commit(path, keep)
        self._drop_tokens()
        self.promote_live()

    def prune(self, nodes: Collection[int]) -> None:
        self.table.prune(nodes)
        self._drop_tokens()

    def _drop_tokens(self) -> None:
        self._tokens = {node: self._tokens[node] for node in self.table.ids}

    def promote_live(self) -> None:
        """Make `live` the base if it has gone through the committed tokens and no others, or can be
        rolled back to the last of them."""
        replayed = self.replayed
        if self._live is None or self._through[: len(replayed)] != replayed:
            return
        if self._through == replayed:
            base, dropped = self._live, self._base
        elif self._can_roll_back:
            self._states.roll_back(len(replayed))
            self._give_base()  # frees the llama.cpp sequence that the copy takes
            base = self._states.copied(self._live, self, self.table.n_committed)
            dropped = self._live
        else:
            return
        self._base, self._live, self._through, self._has_lost = base, None, [], False
        if dropped is not None:
            self._states.give_back(dropped)

    @property
    def _can_roll_back(self) -> bool:
        """Whether `live` can be rolled back to the last committed token, and no node needs it."""
        return (
            self._live is not None
            and bool(self.replayed)
            and not self.table.ids
            and self._states.can_roll_back(self._live, self.n_base, len(self.replayed))
        )

    def restorable(self, length: int) -> int:
        if self._base is not None and length >= self.n_base:
            # Tokens whose states were lost are nothing for others to reuse.
            return self.n_base if self._has_lost else length
        n_checkpoint = 0 if self._checkpoint is None else len(self._checkpoint)
        return n_checkpoint if length >= n_checkpoint else 0

    @property
    def snapshot_lengths(self) -> tuple[int, ...]:
        """See SequenceKV.snapshot_lengths; none if its states were taken for others."""
        if self._base is None or (self._has_lost and self.replayed):
            return ()
        n_checkpoint = 0 if self._checkpoint is None else len(self._checkpoint)
        first = (n_checkpoint,) if 0 < n_checkpoint < self.n_base else ()
        return (*first, self.table.n_committed)

    @property
    def base_sequence(self) -> int | None:
        """The llama.cpp sequence with the state after the first `n_base` tokens."""
        return None if self._base is None else self._base.sequence

    def load(self, token_ids: list[int], n_base: int, read: Callable[[int], None]) -> None:
        """Fill an empty store with tokens, of which the first `n_base` have a state.

        read: load that state into a llama.cpp sequence.
        """
        if n_base:
            self._states.ensure(n_base)
            self._base = self._states.take(self)
            self._states.grow(self._base, n_base)  # first: a failure leaves cells to free
            read(self._base.sequence)
        self.table.append(token_ids)
        self.check_integrity()

    def rollback(self, length: int) -> None:
        if not 0 <= length <= self.table.n_committed:
            raise BackendError(
                f"cannot roll back to {length}: {self.table.n_committed} are committed"
            )
        self._return_to(self.restorable(length))

    def abort(self, n_intact: int | None = None) -> None:
        if n_intact is not None:
            self.table.cut(n_intact)
        length = self.table.n_committed
        self._return_to(length if length >= self.n_base else self.restorable(length))

    def _return_to(self, length: int) -> None:
        """Drop all live nodes, and committed tokens from a `restorable` length on."""
        self.give_live()
        if length < self.n_base:
            assert self._base is not None
            self._states.give_back(self._base)
            self._base = None
            if length and self._checkpoint is not None:
                self._base = self._states.copied(self._checkpoint, self)
        if self._checkpoint is not None and length < len(self._checkpoint):
            self.give_checkpoint()
        self.table.rollback(length)
        self._tokens = {}
        self._has_lost = self._has_lost and length > self.n_base
        self.check_integrity()

    # --- states -----------------------------------------------------------------------------

    def give_live(self) -> bool:
        state, self._live, self._through = self._live, None, []
        if state is not None:
            self._states.give_back(state)
        return state is not None

    def give_checkpoint(self) -> bool:
        state, self._checkpoint = self._checkpoint, None
        if state is not None:
            self._states.give_back(state)
        return state is not None

    def return_to_checkpoint(self) -> None:
        self.give_live()
        self._has_lost = self._base is not None
        if self._base is None or self._checkpoint is None:
            return
        if self.n_base > len(self._checkpoint):
            self._states.give_back(self._base)
            self._base = self._states.copied(self._checkpoint, self)

    @property
    def cells(self) -> Iterator[Cell]:
        for state in (self._base, self._live, self._checkpoint):
            yield from () if state is None else state.cells

    def forget(self) -> bool:
        had_more = self.give_live() | self.give_checkpoint()
        return self._give_base() or had_more

    def _give_base(self) -> bool:
        state, self._base = self._base, None
        if state is not None:
            self._states.give_back(state)
        return state is not None

    def fork(self, length: int) -> RecurrentStore:
        """Return a store with the first `restorable` tokens of this one."""
        length = self.restorable(length)
        other = RecurrentStore(self._states)
        source = self._base if length >= self.n_base else self._checkpoint
        if length and source is not None:
            other._base = self._states.copied(source, other)
        other.table.append(self.table.committed[:length])
        return other

    def close(self) -> None:
        self.table.rollback(0)
        self._states.end(self)

    def check_integrity(self) -> None:
        """Raise RuntimeError if a state has other tokens in llama.cpp."""
        if self.n_base > self.table.n_committed:
            raise RuntimeError(f"{self.n_base} tokens of {self.table.n_committed} have a state")
        for state in (self._base, self._live, self._checkpoint):
            if state is not None:
                self._states.check_length(state)
