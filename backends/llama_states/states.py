"""Recurrent states and cells of a llama.cpp context: which llama.cpp sequence has which tokens.

A llama.cpp sequence of a model with recurrent layers has one state of them, after its last token,
and the cells of its attention layers. A copy of a sequence shares both until one of the two goes
on, so a copy is what a snapshot is elsewhere.

Attention of a token is a sum over cells in memory order, so the cells of each sequence must be in
the order of positions. llama.cpp writes new cells to the first free places; a gap would take them
out of order. Cells cannot be moved here, because llama.cpp copies a state with them. So cells that
a sequence leaves before others go to the sequence `graveyard`, which no token attends to. When the
cache is full, all sequences return to the ends of their prompts, and compute their answers again;
if that frees too little, they forget all states and cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Protocol

from backends.contract.backend import KvUsage
from backends.llama_states.state_inputs import StateInputs


class StateUser(Protocol):
    """A sequence of the backend (see RecurrentStore). Its states are a cache: what it lacks is
    computed again from its tokens."""

    @property
    def num_tokens(self) -> int:
        """Committed tokens and live nodes."""

    def give_live(self) -> bool:
        """Release the state of live nodes; return whether there was one."""

    def give_checkpoint(self) -> bool:
        """Release the checkpoint; return whether there was one."""

    def return_to_checkpoint(self) -> None:
        """Release the states after the checkpoint."""

    def forget(self) -> bool:
        """Release all states; return whether there were any."""

    @property
    def cells(self) -> Iterator[Cell]:
        """Cells of all its states; shared ones several times."""


class Cell:
    """A cell of the cache, used by so many states; 0: only the graveyard has it."""

    __slots__ = ("n_users",)

    def __init__(self) -> None:
        self.n_users = 0


class State:
    """A llama.cpp sequence: the state and the cells of its tokens."""

    __slots__ = ("cells", "sequence")

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self.cells: list[Cell] = []

    def __len__(self) -> int:
        return len(self.cells)


class States:
    """The llama.cpp sequences of one context, and the order of its cells.

    Args:
        library, memory: llama_cpp, and the context's llama_memory_t.
        n_sequences: llama.cpp sequences for states; the next one is the graveyard, and the one
            after it stays empty: graphs are recorded in it (see StreamedLayers).
        n_cells: maximum number of cells in use.
        inputs: what recurrent layers put into their states in the last pass; None: not kept.
    """

    def __init__(
        self,
        library: ModuleType,
        memory: Any,
        n_sequences: int,
        n_cells: int,
        inputs: StateInputs | None = None,
    ) -> None:
        self.n_sequences, self.n_cells = n_sequences, n_cells
        self._graveyard = n_sequences
        self._library, self._memory, self._inputs = library, memory, inputs
        self._unused = list(range(n_sequences))
        self._users: list[StateUser] = []
        self._order: list[Cell] = []  # in memory order
        self._n_touched = 0  # cells that were ever written

    # --- sequences --------------------------------------------------------------------------

    def add(self, user: StateUser) -> None:
        self._users.append(user)

    def end(self, user: StateUser) -> None:
        user.forget()
        self._users.remove(user)

    def take(self, user: StateUser) -> State:
        """Return an empty state for a user, which others lose if there are not enough."""
        while not self._unused:
            remaining = [other for other in self._users if other is not user]
            givers = (
                *(other.give_live for other in remaining),
                *(other.give_checkpoint for other in remaining),
                user.give_checkpoint,
                *(other.forget for other in remaining),
            )
            if not any(give() for give in givers):
                raise RuntimeError(f"{self.n_sequences} recurrent states are too few for a pass")
        return State(self._unused.pop(0))

    def copied(self, source: State | None, user: StateUser, length: int | None = None) -> State:
        """Return a copy of a state, or an empty one for None.

        length: tokens whose cells the copy has; its recurrent state is the same. None: all.
        """
        copy = self.take(user)
        if source is not None and len(source):
            end = len(source) if length is None else length
            self._library.llama_memory_seq_cp(self._memory, source.sequence, copy.sequence, 0, end)
            copy.cells = source.cells[:end]
            for cell in copy.cells:
                cell.n_users += 1
        return copy

    def can_roll_back(self, state: State, n_before: int, num_tokens: int) -> bool:
        """Return whether a state can be rolled back to the first `num_tokens` of the last pass,
        which went on from one of `n_before` tokens."""
        inputs = self._inputs
        return inputs is not None and inputs.can_roll_back(state.sequence, n_before, num_tokens)

    def roll_back(self, num_tokens: int) -> None:
        """Let the state of the last pass be that after its first `num_tokens` tokens.

        llama.cpp stores the position of the last token with it, and compares it with the next
        pass's for a warning alone.
        """
        assert self._inputs is not None
        self._inputs.roll_back(num_tokens)

    def give_back(self, state: State) -> None:
        self.clear(state)
        self._unused.append(state.sequence)

    def clear(self, state: State) -> None:
        """Drop a state, and its cells unless cells of others lie behind them."""
        for cell in state.cells:
            cell.n_users -= 1
        start = next((i for i, cell in enumerate(state.cells) if not cell.n_users), len(state))
        own = state.cells[start:]
        if own and self._order[len(self._order) - len(own) :] != own:
            self._library.llama_memory_seq_cp(
                self._memory, state.sequence, self._graveyard, start, len(state)
            )
        else:
            del self._order[len(self._order) - len(own) :]
        state.cells = []
        self._remove(state.sequence)
        self._empty_graveyard()

    def _empty_graveyard(self) -> None:
        """Free the cells of the graveyard if none in use lies behind them."""
        n_used = sum(cell.n_users > 0 for cell in self._order)
        if n_used == len(self._order) or any(not c.n_users for c in self._order[:n_used]):
            return
        del self._order[n_used:]
        self._remove(self._graveyard)

    # --- cells ------------------------------------------------------------------------------

    @property
    def n_free(self) -> int:
        """Cells for more tokens, if no sequences shared any."""
        return self.n_cells - sum(user.num_tokens for user in self._users)

    @property
    def use(self) -> KvUsage:
        counts = [cell.n_users for cell in list(self._order)]
        n_used = sum(n > 0 for n in counts)
        n_tokens = sum(user.num_tokens for user in list(self._users))
        return KvUsage(n_used, max(0, n_tokens - n_used))

    def ensure(self, n_new: int) -> None:
        """Prepare for `n_new` cells of a new state."""
        for release in self.releases:
            if self.has_capacity(n_new):
                return
            release()

    def has_capacity(self, n_new: int) -> bool:
        return len(self._order) + n_new <= self.n_cells

    @property
    def releases(self) -> tuple[Callable[[], None], ...]:
        """Ways to free cells, in order: sequences compute what they lose again."""
        return self._return_to_checkpoints, self._forget_all

    def _return_to_checkpoints(self) -> None:
        """Return to the ends of prompts; forget those that lie behind an unused cell, which is not
        freed before they are."""
        for user in self._users:
            user.return_to_checkpoint()
        unused = (i for i, cell in enumerate(self._order) if not cell.n_users)
        first = self._order[: next(unused, len(self._order))]
        for user in self._users:
            if not set(user.cells) <= set(first):
                user.forget()

    def _forget_all(self) -> None:
        for user in self._users:
            user.forget()

    def grow(self, state: State, n_new: int) -> None:
        """Record that a pass has written the next cells of a state."""
        cells = [Cell() for _ in range(n_new)]
        for cell in cells:
            cell.n_users = 1
        state.cells += cells
        self._order += cells
        self._n_touched = max(self._n_touched, len(self._order))

    def n_growth(self, num_tokens: int) -> int:
        """Return how many cells are written for the first time until users have `num_tokens`."""
        n_dead = sum(not cell.n_users for cell in self._order)
        return max(0, min(num_tokens + n_dead, self.n_cells) - self._n_touched)

    # --- calls of llama.cpp -----------------------------------------------------------------

    def empty_scratch(self) -> None:
        """Do nothing: padding is in the state that goes through it, and removed with it."""

    def check_length(self, state: State) -> None:
        """Raise RuntimeError if a state has other tokens in llama.cpp."""
        actual = self._library.llama_memory_seq_pos_max(self._memory, state.sequence) + 1
        if actual != len(state):
            raise RuntimeError(
                f"sequence {state.sequence} has {actual} tokens in llama.cpp, not {len(state)}"
            )

    def _remove(self, sequence: int) -> None:
        if not self._library.llama_memory_seq_rm(self._memory, sequence, -1, -1):
            raise RuntimeError(f"llama.cpp did not remove sequence {sequence}")
