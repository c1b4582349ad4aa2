"""The cells of a llama.cpp KV cache: which sequences use them, and their order in memory.

Attention of a token is a sum over cells in memory order (masked cells change nothing), so an exact
backend keeps the cells of each sequence in the order of positions: the prefix, then the live nodes.
Cells of other sequences may lie between them. llama.cpp writes new cells to the first free places,
so there must be no gap before a pass: gaps that a commit, a prune or a rollback leaves are closed
then, for all sequences at once. Cells after the first gap are moved into it, a few at a time, by
saving and restoring them with llama.cpp:

    cells     a b c | x d y e      after commit of (d, e), which x and y were not part of:
              a b c | . d . e      d is copied to the scratch sequence, saved, and restored into the
              a b c | d . . e      gap; then the other sequences release the old cell; then e

A finished sequence would leave gaps before nearly all cells of others. It keeps its cells, which no
token attends to, until a pass needs them, or closing the gaps moves no more cells than it frees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

from backends.contract.backend import BackendError, KvUsage
from backends.ggml.library import LlamaModel
from backends.llama.context import LlamaContext
from backends.llama.prefix import SequenceState

MOVED_CELLS = 8
"""Maximum number of cells whose keys and values are copied at once when cells are moved."""


class CellUser(Protocol):
    """A sequence of the backend (see CellStore); it owns several sequences of llama.cpp."""

    cells: list[Cell]
    """Cells of its prefix and its live nodes, in order."""
    has_ended: bool

    @property
    def in_use(self) -> list[int]:
        """llama.cpp's sequences that it owns, each of which has the prefix."""

    @property
    def n_needed(self) -> int:
        """Minimum number of llama.cpp's sequences that it needs now."""

    def live_cells(self) -> dict[Cell, list[int]]:
        """Return the cells of live nodes, with the llama.cpp sequences that each belongs to."""

    def give_idle(self) -> None:
        """Release the llama.cpp sequences that it does not need now."""

    def free(self) -> None:
        """Release all cells and sequences after its end."""


class Cell:
    """A cell in use, or a gap if it has no users."""

    __slots__ = ("position", "users")

    def __init__(self, position: int, users: list[CellUser]) -> None:
        self.position, self.users = position, users

    @property
    def is_live(self) -> bool:
        """Whether a running sequence uses it."""
        return any(not user.has_ended for user in self.users)


_GAP = Cell(-1, [])


class Cells:
    """The cells of one context and its sequences.

    Args:
        n_sequences: llama.cpp sequences for users; the next one is `scratch`, empty between calls.
        n_cells: maximum number of cells in use.
        state: used to move cells into the order of positions; None: they are not moved.
    """

    def __init__(
        self,
        model: LlamaModel,
        context: LlamaContext,
        n_sequences: int,
        n_cells: int,
        state: SequenceState | None = None,
    ) -> None:
        self.scratch, self.n_cells = n_sequences, n_cells
        self.window = model.sliding_window
        self.state = state
        self.n_moved = 0
        """Cells moved so far."""
        self._library: ModuleType = model.library
        self._memory: Any = context.memory
        self._unused = list(range(n_sequences))
        self._users: list[CellUser] = []
        self._ended: list[CellUser] = []
        self._order: list[Cell] = []  # in memory order; without `state`, as written
        self._n_used = 0
        self._n_dead = 0  # cells that only finished sequences use
        self._is_new_end = False
        self._n_touched = 0  # cells that were ever written

    # --- sequences --------------------------------------------------------------------------

    def add(self, user: CellUser) -> None:
        self._users.append(user)

    def take_sequences(self, n: int) -> list[int]:
        """Take unused llama.cpp sequences, the lowest first. Raises BackendError if there are not
        enough."""
        for user in self._users:
            if len(self._unused) >= n:
                break
            user.give_idle()
        if len(self._unused) < n:
            self._free_ended()
        if len(self._unused) < n:
            raise BackendError(
                f"all of the cache's {self.scratch} sequences are in use, one for each leaf of a "
                f"tree and two for each other request, of which there are {len(self._users)}: "
                "draft fewer branches, end a sequence, or raise max_nodes or max_num_seqs"
            )
        self._unused.sort()
        taken, self._unused = self._unused[:n], self._unused[n:]
        return taken

    @property
    def n_free_sequences(self) -> int:
        """llama.cpp sequences that can be taken, idle ones of other users included."""
        return self.scratch - sum(user.n_needed for user in self._users)

    def give_back(self, sequence: int) -> None:
        self.remove(sequence, 0)
        self._unused.append(sequence)

    def end(self, user: CellUser) -> None:
        """Mark a user as finished, so that its cells can be reused."""
        self._users.remove(user)
        self._ended.append(user)
        self._n_dead += sum(not cell.is_live for cell in user.cells)
        self._is_new_end = True
        if self.state is None:
            self._free_ended()

    def _free_ended(self) -> None:
        while self._ended:
            self._ended[-1].free()
            self._ended.pop()

    # --- cells ------------------------------------------------------------------------------

    @property
    def n_free(self) -> int:
        """Cells that can be written, those of finished sequences included."""
        return self.n_cells - self._n_used + self._n_dead

    @property
    def use(self) -> KvUsage:
        cells = [cell for cell in list(self._order) if cell.is_live]
        n_holders = sum(sum(not user.has_ended for user in list(cell.users)) for cell in cells)
        return KvUsage(len(cells), n_holders - len(cells))

    def grow(self, sequences: Sequence[CellUser], positions: Sequence[int]) -> None:
        """Record that a pass has written a cell for each of these users, in this order."""
        for user, position in zip(sequences, positions, strict=True):
            cell = Cell(position, [user])
            user.cells.append(cell)
            self._order.append(cell)
        self._n_used += len(sequences)
        self._n_touched = max(self._n_touched, len(self._order))

    def n_growth(self, num_tokens: int) -> int:
        """Return how many cells are written for the first time until users have `num_tokens`; cells
        of finished users lie between theirs."""
        return max(0, min(num_tokens + self._n_dead, self.n_cells) - self._n_touched)

    def release_cells(self, user: CellUser, cells: Sequence[Cell]) -> None:
        """Remove a user from these cells."""
        for cell in cells:
            was_dead = not cell.is_live
            cell.users.remove(user)
            self._n_used -= not cell.users
            self._n_dead += bool(cell.users) and not cell.is_live
            self._n_dead -= was_dead

    def arrange(self, n_new: int) -> None:
        """Prepare for `n_new` cells; close all gaps if cells are moved. A failure loses none."""
        if self._ended and (self._n_used + n_new > self.n_cells or self._pays_to_move()):
            self._free_ended()
        if self.state is None:
            self._order = [cell for cell in self._order if cell.users]
        else:
            self._close_gaps()

    def _pays_to_move(self) -> bool:
        """Return whether closing the gaps moves no more cells than it frees."""
        if not self._is_new_end:
            return False  # same as last time, with more cells to move
        self._is_new_end = False
        is_live = [cell.is_live for cell in self._order]
        n_ahead = is_live.index(False) if False in is_live else len(is_live)
        n_behind = sum(is_live[n_ahead:])
        return n_behind <= len(is_live) - n_ahead - n_behind

    def _close_gaps(self) -> None:
        order = self._order
        front = next((i for i, cell in enumerate(order) if not cell.users), len(order))
        at = front
        live: dict[Cell, list[int]] = {}
        if any(cell.users for cell in order[front:]):
            live = {c: names for user in self._users for c, names in user.live_cells().items()}
        while at < len(order):
            if not order[at].users:
                at += 1
                continue
            moved = self._together(at, at - front, live)
            cells = [order[i] for i in moved]
            self._move(self._holders(cells[0], live), cells[0].position, len(cells))
            for i in moved:
                order[i] = _GAP
            order[front : front + len(cells)] = cells
            front += len(cells)
        del order[front:]

    def _holders(self, cell: Cell, live: Mapping[Cell, list[int]]) -> list[int]:
        """Return the llama.cpp sequences that a cell of a live node or of prefixes belongs to."""
        if cell in live:
            return live[cell]
        return [sequence for user in cell.users for sequence in user.in_use]

    def _together(self, at: int, n_gap: int, live: Mapping[Cell, list[int]]) -> list[int]:
        """Return the cells to move at once: consecutive ones of the same sequences that fit in the
        gap, within one sliding window, since llama.cpp saves no more."""
        position = self._order[at].position
        holders = self._holders(self._order[at], live)
        max_count = min(MOVED_CELLS, n_gap)
        if self.window:
            max_count = min(max_count, self.window - position % self.window)
        together = [at]
        for i in range(at + 1, len(self._order)):
            cell = self._order[i]
            if not cell.users:
                continue
            is_next = cell.position == position + len(together)
            if len(together) == max_count or not is_next or self._holders(cell, live) != holders:
                break
            together.append(i)
        return together

    def _move(self, holders: Sequence[int], position: int, n_cells: int) -> None:
        """Move the cells of these sequences from `position` on to the first gap."""
        assert self.state is not None
        end = position + n_cells
        self.copy(holders[0], self.scratch, position, end)
        buffer = memoryview(bytearray(self.state.n_bytes(self.scratch)))
        self.state.get(buffer, self.scratch)
        self.empty_scratch()
        self.state.set(buffer, self.scratch)
        for sequence in holders:
            self.remove(sequence, position, end)
            self.copy(self.scratch, sequence, position, end)
        self.empty_scratch()
        self.n_moved += n_cells

    # --- calls of llama.cpp -----------------------------------------------------------------

    def empty_scratch(self) -> None:
        self.remove(self.scratch, 0)

    def copy(self, source: int, destination: int, start: int, end: int) -> None:
        if end > start:
            self._library.llama_memory_seq_cp(self._memory, source, destination, start, end)

    def remove(self, sequence: int, start: int, end: int = -1) -> None:
        if not self._library.llama_memory_seq_rm(self._memory, sequence, start, end):
            raise RuntimeError(f"llama.cpp did not remove sequence {sequence} from {start} on")

    def check_lengths(self, lengths: Mapping[int, int]) -> None:
        check_lengths(self._library, self._memory, lengths)


def check_lengths(library: ModuleType, memory: Any, lengths: Mapping[int, int]) -> None:
    """Raise RuntimeError if a sequence has other positions than 0 .. length - 1."""
    first, last = library.llama_memory_seq_pos_min, library.llama_memory_seq_pos_max
    for sequence, length in lengths.items():
        expected = (0, length - 1) if length else (-1, -1)
        actual = (first(memory, sequence), last(memory, sequence))
        if actual != expected:
            raise RuntimeError(
                f"KV cache sequence {sequence} holds positions {actual[0]} to {actual[1]}, "
                f"expected {expected[0]} to {expected[1]}"
            )
