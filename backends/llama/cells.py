"""The cells of a llama.cpp KV cache: which sequences hold them, and in what order they lie.

A row's attention is a sum over cells in the order in which they lie (cells that the row does not
see change nothing), so a backend that is exact keeps those of each text in the order of positions:
the prefix, and behind it the live nodes. Cells of other sequences may lie between them. New cells take
the first free ones, so there must be no gap before a pass: what a commit, a prune or a rollback
leaves of them is closed then, for all sequences at once. Cells behind the first gap are moved into it,
a few at a time, as llama.cpp saves and restores them:

    lies as   a b c | x d y e      after commit of (d, e), which x and y were not part of:
              a b c | . d . e      d goes into the spare sequence, is saved, and restored into the
              a b c | d . . e      gap; then the other sequences let go of the old cell; then e

A text that ends would leave gaps in front of nearly all that others hold. It keeps its cells, which
nobody sees, until a pass needs them, or closing the gaps moves no more cells than it frees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

from backends.contract.backend import BackendError, KvUse
from backends.ggml.library import LlamaModel
from backends.llama.context import LlamaContext
from backends.llama.prefix import SequenceState

MOVED_CELLS = 8
"""Whose keys and values are held beside the cache while they are moved."""


class CellUser(Protocol):
    """A text, as far as its cells go (see CellStore)."""

    cells: list[Cell]
    """Of its prefix and its live nodes, in their order."""
    has_ended: bool

    @property
    def in_use(self) -> list[int]:
        """Its sequences, each of which holds the prefix."""

    @property
    def n_needed(self) -> int:
        """Sequences that it cannot do without now."""

    def live_cells(self) -> dict[Cell, list[int]]:
        """Cells of live nodes, with the sequences that hold each."""

    def give_idle(self) -> None:
        """Give back sequences that it can do without now."""

    def free(self) -> None:
        """Give back everything: it has ended."""


class Cell:
    """A cell in use, or a gap where no text holds it."""

    __slots__ = ("position", "users")

    def __init__(self, position: int, users: list[CellUser]) -> None:
        self.position, self.users = position, users

    @property
    def is_live(self) -> bool:
        """Whether a text holds it that has not ended."""
        return any(not user.has_ended for user in self.users)


_GAP = Cell(-1, [])


class Cells:
    """The cells of one context and its sequences.

    Args:
        n_sequences: for sequences; the one behind them is `spare`, empty between calls.
        n_cells: most that sequences may have.
        state: moves cells into the order of positions; None leaves them where they are.
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
        """Cells that were moved so far."""
        self._library: ModuleType = model.library
        self._memory: Any = context.memory
        self._unused = list(range(n_sequences))
        self._texts: list[CellUser] = []
        self._ended: list[CellUser] = []
        self._lying: list[Cell] = []  # in their order; without `state`, in that of their passes
        self._n_used = 0
        self._n_dead = 0  # of those in use: held by ended sequences alone
        self._is_new_end = False
        self._n_touched = 0  # that were ever written

    # --- sequences --------------------------------------------------------------------------

    def add(self, text: CellUser) -> None:
        self._texts.append(text)

    def take_sequences(self, n: int) -> list[int]:
        """Sequences that nobody uses, the lowest first. Raises BackendError where there are not so
        many."""
        for text in self._texts:
            if len(self._unused) >= n:
                break
            text.give_idle()
        if len(self._unused) < n:
            self._free_ended()
        if len(self._unused) < n:
            raise BackendError(
                f"all of the cache's {self.scratch} sequences are in use, one for each leaf of a "
                f"tree and two for each other text, of which there are {len(self._texts)}: draft "
                "fewer branches, end a text, or raise max_nodes or max_texts"
            )
        self._unused.sort()
        taken, self._unused = self._unused[:n], self._unused[n:]
        return taken

    @property
    def n_free_sequences(self) -> int:
        """Sequences that sequences may get, those that others can do without among them."""
        return self.scratch - sum(text.n_needed for text in self._texts)

    def give_back(self, sequence: int) -> None:
        self.remove(sequence, 0)
        self._unused.append(sequence)

    def end(self, text: CellUser) -> None:
        """The text has ended: its cells are to be had."""
        self._texts.remove(text)
        self._ended.append(text)
        self._n_dead += sum(not cell.is_live for cell in text.cells)
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
        """Cells that sequences may get, those of ended sequences among them."""
        return self.n_cells - self._n_used + self._n_dead

    @property
    def use(self) -> KvUse:
        cells = [cell for cell in list(self._lying) if cell.is_live]
        n_holders = sum(sum(not user.has_ended for user in list(cell.users)) for cell in cells)
        return KvUse(len(cells), n_holders - len(cells))

    def grow(self, sequences: Sequence[CellUser], positions: Sequence[int]) -> None:
        """A pass has written a cell of each of these sequences, in this order."""
        for text, position in zip(sequences, positions, strict=True):
            cell = Cell(position, [text])
            text.cells.append(cell)
            self._lying.append(cell)
        self._n_used += len(sequences)
        self._n_touched = max(self._n_touched, len(self._lying))

    def n_growth(self, num_tokens: int) -> int:
        """Cells that were never written, of those that sequences with so many rows need. What ended
        sequences still hold lies between theirs."""
        return max(0, min(num_tokens + self._n_dead, self.n_cells) - self._n_touched)

    def let_go(self, text: CellUser, cells: Sequence[Cell]) -> None:
        """The text's sequences do not hold these any more."""
        for cell in cells:
            was_dead = not cell.is_live
            cell.users.remove(text)
            self._n_used -= not cell.users
            self._n_dead += bool(cell.users) and not cell.is_live
            self._n_dead -= was_dead

    def settle(self, n_new: int) -> None:
        """Let the next `n_new` cells lie behind all others.

        What fails in here loses nothing.
        """
        if self._ended and (self._n_used + n_new > self.n_cells or self._pays_to_move()):
            self._free_ended()
        if self.state is None:
            self._lying = [cell for cell in self._lying if cell.users]
        else:
            self._close_gaps()

    def _pays_to_move(self) -> bool:
        """Whether no more cells would be moved than those of ended sequences."""
        if not self._is_new_end:
            return False  # as it was, and there are more cells now
        self._is_new_end = False
        is_live = [cell.is_live for cell in self._lying]
        n_ahead = is_live.index(False) if False in is_live else len(is_live)
        n_behind = sum(is_live[n_ahead:])
        return n_behind <= len(is_live) - n_ahead - n_behind

    def _close_gaps(self) -> None:
        lying = self._lying
        front = next((i for i, cell in enumerate(lying) if not cell.users), len(lying))
        at = front
        live: dict[Cell, list[int]] = {}
        if any(cell.users for cell in lying[front:]):
            live = {c: names for text in self._texts for c, names in text.live_cells().items()}
        while at < len(lying):
            if not lying[at].users:
                at += 1
                continue
            moved = self._together(at, at - front, live)
            cells = [lying[i] for i in moved]
            self._move(self._holders(cells[0], live), cells[0].position, len(cells))
            for i in moved:
                lying[i] = _GAP
            lying[front : front + len(cells)] = cells
            front += len(cells)
        del lying[front:]

    def _holders(self, cell: Cell, live: Mapping[Cell, list[int]]) -> list[int]:
        """The sequences that hold a cell: of a live node, or of sequences' prefixes."""
        if cell in live:
            return live[cell]
        return [sequence for user in cell.users for sequence in user.in_use]

    def _together(self, at: int, n_gap: int, live: Mapping[Cell, list[int]]) -> list[int]:
        """Which cells to move at once: those that follow each other in the same sequences, fit in
        the gap, and lie in one window or chunk of that size, for llama.cpp saves no more."""
        position = self._lying[at].position
        holders = self._holders(self._lying[at], live)
        max_count = min(MOVED_CELLS, n_gap)
        if self.window:
            max_count = min(max_count, self.window - position % self.window)
        result = [at]
        for i in range(at + 1, len(self._lying)):
            cell = self._lying[i]
            if not cell.users:
                continue
            is_next = cell.position == position + len(result)
            if len(result) == max_count or not is_next or self._holders(cell, live) != holders:
                break
            result.append(i)
        return result

    def _move(self, holders: Sequence[int], position: int, n_cells: int) -> None:
        """Bring the cells of these positions, which these sequences hold, to the first gap."""
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

    # --- llama.cpp's ------------------------------------------------------------------------

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
    """Raise RuntimeError where a sequence does not hold exactly positions 0 .. length - 1."""
    first, last = library.llama_memory_seq_pos_min, library.llama_memory_seq_pos_max
    for sequence, length in lengths.items():
        requested = (0, length - 1) if length else (-1, -1)
        result = (first(memory, sequence), last(memory, sequence))
        if result != requested:
            raise RuntimeError(
                f"KV cache sequence {sequence} holds positions {result[0]} to {result[1]}, "
                f"expected {requested[0]} to {requested[1]}"
            )
