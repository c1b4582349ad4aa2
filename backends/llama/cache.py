"""Trees of tentative nodes as sequences of a llama.cpp KV cache.

A cell of the cache belongs to any number of sequences, and a row of a batch attends to the cells of
its (first) sequence. So every leaf of the tree has a sequence of its own: the committed prefix and
the path down to it.

    prefix   a b c      cells of sequences 0 1 2 (all those in use, always)
    live     d          0 1
             e          0            (d, e) ends sequence 0
             f            1          (d, f) ends sequence 1; sequence 2 is idle

Sequences that are in use keep the prefix when they are idle, so that a new leaf costs the copy of
its live path only: each copied cell is an insertion into an ordered set, and each of llama.cpp's
calls looks at all cells. These calls report nothing; what they did is checked by the lengths of the
sequences.

A row's attention is a sum over cells in the order in which they lie (cells that the row does not
see change nothing), so a backend that is exact keeps them in the order of positions: the prefix,
and behind it the live nodes, without gaps. New cells take the first free ones, so nothing is to be
done until a commit or a prune leaves gaps; then the cells behind the first gap are moved, a few at
a time, as llama.cpp saves and restores them:

    lies as   a b c | x d y e      after commit of (d, e), which x and y were not part of:
              a b c | . d . e      d goes into the spare sequence, is saved, dropped and restored,
              a b c d . . e        which puts it where the first gap is; then e
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import ModuleType
from typing import Any

from backends.contract.backend import PREFIX, BackendError
from backends.contract.nodes import NodeTable
from backends.ggml.library import LlamaModel
from backends.llama.context import LlamaContext
from backends.llama.prefix import SequenceState

_MIN_IN_USE = 2
"""A sliding-window cache reuses cells of a single sequence once they are out of its window; with
two sequences on every committed cell a rollback finds all of them."""

MOVED_CELLS = 8
"""Whose keys and values are held beside the cache while they are moved."""


class TreeSequences:
    """Which sequence holds which live node, kept in step with a `NodeTable`.

    Args:
        n_sequences: for leaves, 2 or more; the one behind them is `spare`, empty between calls.
        state: moves cells into the order of positions; None leaves them where they are.
    """

    def __init__(
        self,
        model: LlamaModel,
        context: LlamaContext,
        n_sequences: int,
        state: SequenceState | None = None,
    ) -> None:
        self.table = NodeTable()
        self.n_sequences = self.spare = n_sequences
        self._state = state
        self._library, self._memory = model.library, context.memory
        self._window = model.sliding_window
        self.new: list[list[int]] = []
        """Sequences of each node that was added last."""
        self._idle = list(range(_MIN_IN_USE))
        self._ends: dict[int, int] = {}  # busy sequence -> the leaf that it ends at
        self._through: dict[int, int] = {}  # live node -> a sequence that holds it

    @property
    def in_use(self) -> list[int]:
        """Sequences that hold the prefix: a committed token belongs to all of them."""
        return sorted([*self._idle, *self._ends])

    # --- growing ---------------------------------------------------------------------------

    def add(self, parents: Sequence[int], token_ids: Sequence[int]) -> list[int]:
        """Register nodes; return their ids. `new` is what each is to be decoded with.

        Raises BackendError where a parent is not live, or there are more leaves than sequences.
        """
        ids = self.table.add(parents, token_ids)
        self._check_window()
        new = dict(zip(ids, range(len(ids)), strict=True))
        sequences: list[list[int]] = [[] for _ in ids]
        inner = set(parents)
        for leaf in (node for node in ids if node not in inner):
            path = self.table.path(leaf)
            above = [node for node in path if node not in new]
            sequence = self._sequence_below(above[-1] if above else PREFIX)
            self._ends[sequence] = leaf
            for node in path[len(above) :]:
                sequences[new[node]].append(sequence)
        for node, row in new.items():
            self._through[node] = sequences[row][0]
        self.new = sequences
        return ids

    def _sequence_below(self, node: int) -> int:
        """A sequence for a new leaf below a live node: the one that ends there, or a fresh one."""
        if node != PREFIX and self._ends.get(self._through[node]) == node:
            return self._through[node]
        sequence = self._fresh()
        if node != PREFIX:
            source = self._through[node]
            self._copy(source, sequence, self.table.n_committed, self._end_of(node))
        return sequence

    def _fresh(self) -> int:
        if self._idle:
            return self._idle.pop(0)
        sequence = len(self._ends)  # 0 .. here are all busy
        if sequence >= self.n_sequences:
            raise BackendError(
                f"a tree of more than {self.n_sequences} leaves: give the backend more max_nodes"
            )
        self._copy(0, sequence, 0, self.table.n_committed)
        return sequence

    def _check_window(self) -> None:
        if 0 < self._window <= self.table.max_depth:
            raise BackendError(
                f"a draft of {self.table.max_depth} tokens in a row is longer than the model's "
                f"sliding window of {self._window}: draft fewer tokens"
            )

    # --- shrinking -------------------------------------------------------------------------

    def commit(self, path: Sequence[int], keep: Collection[int] = ()) -> None:
        """See Backend.commit. Raises BackendError, and changes nothing, for an invalid path."""
        start = self.table.n_committed
        rows = self.table.commit(path, keep)
        end = self.table.n_committed
        alive = set(self.table.ids)
        source = self._through[path[-1]] if path else 0
        gone = [s for s, leaf in self._ends.items() if leaf not in alive]
        survivors = [s for s in self._ends if s not in set(gone)]
        others = [s for s in self.in_use if s not in survivors and s != source]
        for sequence in gone:
            self._remove(sequence, end if path and sequence == source else start)
            del self._ends[sequence]
        if path:
            for sequence in others:
                self._copy(source, sequence, start, end)
        self._idle = sorted({*self._idle, *gone})
        self._forget()
        self._close_gaps(rows, len(path))
        self.check_integrity()

    def prune(self, nodes: Collection[int]) -> None:
        """See Backend.prune."""
        before = {s: self.table.path(leaf) for s, leaf in self._ends.items()}
        rows = self.table.prune(nodes)
        alive = set(self.table.ids)
        deepest = {s: max(alive.intersection(path), default=PREFIX) for s, path in before.items()}
        gone = {s: node for s, node in deepest.items() if node != self._ends[s]}
        held = {n for s, path in before.items() if s not in gone for n in path}
        # The deepest first: where it stays, it holds the nodes that others would end at.
        for sequence in sorted(gone, key=lambda s: -self._end_of(gone[s])):
            node = gone[sequence]
            if node == PREFIX or node in held:
                self._remove(sequence, self.table.n_committed)
                del self._ends[sequence]
                self._idle.append(sequence)
            else:
                self._remove(sequence, self._end_of(node))
                self._ends[sequence] = node
                held.update(self.table.path(node))
        self._idle.sort()
        self._forget()
        self._close_gaps(rows, 0)
        self.check_integrity()

    def rollback(self, length: int) -> None:
        """See Backend.rollback."""
        self.table.rollback(length)
        self._drop_from(length)

    def append(self, token_ids: Sequence[int]) -> None:
        """Tokens that all sequences in use were given: they are the end of the prefix."""
        self.table.append(token_ids)
        self.check_integrity()

    def adopt(self, token_ids: Sequence[int]) -> None:
        """Sequence 0 of an empty cache was filled with these tokens: they are the prefix."""
        self.table.append(token_ids)
        for sequence in self._idle[1:]:
            self._copy(0, sequence, 0, len(token_ids))
        self.check_integrity()

    def abort(self, n_intact: int | None = None) -> None:
        """Drop every live node, and cells that a broken pass left behind the prefix.

        n_intact: committed tokens that an operation left alone that broke off; None: all.
        """
        if n_intact is not None:
            self.table.cut(n_intact)
        self.table.drop_live()
        self._drop_from(self.table.n_committed)

    def close(self) -> None:
        self.rollback(0)

    def _drop_from(self, length: int) -> None:
        self._remove(-1, length)
        self.empty_spare()
        # Without a gap, also where an error lost a sequence between idle and busy.
        n_used = 1 + max(self.in_use)
        self._idle = list(range(n_used if length else _MIN_IN_USE))
        self._ends, self._through = {}, {}
        self.check_integrity()

    def _forget(self) -> None:
        """Which sequences hold the nodes that are still live."""
        path = self.table.path
        self._through = {n: s for s, leaf in self._ends.items() for n in path(leaf)}

    # --- cells -----------------------------------------------------------------------------

    def _close_gaps(self, rows: Sequence[int], n_committed: int) -> None:
        """Move cells up to the first gap.

        Args:
            rows: what now follows the old prefix, as rows of the live nodes before.
            n_committed: so many of them are committed.
        """
        n_in_place = next((i for i, row in enumerate(rows) if i != row), len(rows))
        if self._state is None or n_in_place == len(rows):
            return
        start = self.table.n_committed - n_committed
        paths = {s: set(self.table.path(leaf)) for s, leaf in self._ends.items()}
        holders = [self.in_use] * n_committed
        holders += [[s for s, path in paths.items() if n in path] for n in self.table.ids]
        positions = [*range(start, start + n_committed), *self.table.positions().tolist()]
        cells = list(zip(positions, holders, strict=True))[n_in_place:]
        while cells:
            n_cells = _n_together(cells, self._window)
            self._move(cells[0][1], cells[0][0], n_cells)
            del cells[:n_cells]

    def _move(self, holders: Sequence[int], position: int, n_cells: int) -> None:
        """Bring the cells of these positions, which these sequences hold, to the first gap."""
        assert self._state is not None
        end = position + n_cells
        self._copy(holders[0], self.spare, position, end)
        buffer = memoryview(bytearray(self._state.n_bytes(self.spare)))
        self._state.get(buffer, self.spare)
        # No live node has a committed position: there, one call for all sequences will do.
        is_committed = position < self.table.n_committed
        for sequence in (-1,) if is_committed else (*holders, self.spare):
            self._remove(sequence, position, end)
        self._state.set(buffer, self.spare)
        for sequence in holders:
            self._copy(self.spare, sequence, position, end)
        self.empty_spare()

    def empty_spare(self) -> None:
        self._remove(self.spare, 0)

    def check_integrity(self) -> None:
        """Every sequence starts at 0 and ends where it should, as llama.cpp sees it."""
        lengths = dict.fromkeys(self._idle, self.table.n_committed)
        lengths.update({s: self._end_of(leaf) for s, leaf in self._ends.items()})
        check_lengths(self._library, self._memory, lengths)

    def _end_of(self, node: int) -> int:
        """The position behind a live node."""
        return self.table.n_committed + len(self.table.path(node))

    def _copy(self, source: int, destination: int, start: int, end: int) -> None:
        if end > start:
            self._library.llama_memory_seq_cp(self._memory, source, destination, start, end)

    def _remove(self, sequence: int, start: int, end: int = -1) -> None:
        if not self._library.llama_memory_seq_rm(self._memory, sequence, start, end):
            raise RuntimeError(f"llama.cpp did not remove sequence {sequence} from {start} on")


def _n_together(cells: Sequence[tuple[int, list[int]]], window: int) -> int:
    """How many of these (position, sequences) to move at once: a chain in the same sequences, in
    one window or chunk of that size, for llama.cpp saves no more of a sequence."""
    position, holders = cells[0]
    n_most = min(MOVED_CELLS, window - position % window) if window else MOVED_CELLS
    n_cells = 1
    while n_cells < min(n_most, len(cells)) and cells[n_cells] == (position + n_cells, holders):
        n_cells += 1
    return n_cells


def check_lengths(library: ModuleType, memory: Any, lengths: Mapping[int, int]) -> None:
    """Raise RuntimeError where a sequence does not hold exactly positions 0 .. length - 1."""
    first, last = library.llama_memory_seq_pos_min, library.llama_memory_seq_pos_max
    for sequence, length in lengths.items():
        wanted = (0, length - 1) if length else (-1, -1)
        found = (first(memory, sequence), last(memory, sequence))
        if found != wanted:
            raise RuntimeError(
                f"KV cache sequence {sequence} holds positions {found[0]} to {found[1]}, "
                f"expected {wanted[0]} to {wanted[1]}"
            )
