"""Trees of tentative nodes as sequences of a llama.cpp KV cache.

A cell of the cache belongs to any number of sequences, and a token of a batch attends to the cells
of its (first) sequence. So every leaf of the tree has a sequence of its own: the committed prefix
and the path down to it.

    prefix   a b c      cells of sequences 0 1 2 (always all that are in use)
    live     d          0 1
             e          0            (d, e) ends sequence 0
             f            1          (d, f) ends sequence 1; sequence 2 is idle

Idle sequences keep the prefix, so that a new leaf costs only the copy of its live path: each copied
cell is an insertion into an ordered set, and each of llama.cpp's calls looks at all cells. These
calls return nothing; their effect is checked by the lengths of the sequences.

Several `CellStore`s share the cache. Each has llama.cpp sequences of its own, so that none sees
another's cells; a fork shares the cells of a prefix. cells.py keeps the order of all cells.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from backends.contract.backend import PREFIX, BackendError
from backends.contract.nodes import NodeTable
from backends.llama.cells import Cell, Cells

MIN_IN_USE = 2
"""Sequences of a store at least. A sliding-window cache reuses cells of a single sequence once they
are out of the window; with two on every committed cell a rollback finds all of them."""


class CellStore:
    """One sequence of the backend: its tree as llama.cpp sequences, in step with a `NodeTable`."""

    def __init__(self, all_cells: Cells) -> None:
        self.table = NodeTable()
        self.cells: list[Cell] = []
        self.has_ended = False
        self.new: list[list[int]] = []
        """Sequences of each node of the last `add`."""
        self._all_cells = all_cells
        self._owned = all_cells.take_sequences(MIN_IN_USE)
        self._ends: dict[int, int] = {}  # busy sequence -> the leaf that it ends at
        self._through: dict[int, int] = {}  # live node -> a sequence that it belongs to
        all_cells.add(self)

    @property
    def in_use(self) -> list[int]:
        """All sequences of this store; a committed token belongs to all of them."""
        return list(self._owned)

    @property
    def _idle(self) -> list[int]:
        return [sequence for sequence in self._owned if sequence not in self._ends]

    @property
    def n_needed(self) -> int:
        """Minimum number of sequences that it needs now."""
        return max(MIN_IN_USE, len(self._ends))

    def n_leaves_with(self, parents: Sequence[int]) -> int:
        """Return the number of leaves of the tree once nodes with these parents are added."""
        first, inner = self.table.next_id, set(parents)
        leaves = [*self._ends.values(), *range(first, first + len(parents))]
        return sum(node not in inner for node in leaves)

    # --- growing ---------------------------------------------------------------------------

    def add(self, parents: Sequence[int], token_ids: Sequence[int]) -> list[int]:
        """Register nodes; return their ids. `new` has the sequences to decode each one with.

        Raises BackendError if a parent is not live, or there are more leaves than sequences.
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
        """Return a sequence for a leaf below a live node: the one that ends there, or a new one."""
        if node != PREFIX and self._ends.get(self._through[node]) == node:
            return self._through[node]
        sequence = self._fresh()
        if node != PREFIX:
            source = self._through[node]
            self._all_cells.copy(source, sequence, self.table.n_committed, self._end_of(node))
        return sequence

    def _fresh(self) -> int:
        if idle := self._idle:
            return idle[0]
        (sequence,) = self._all_cells.take_sequences(1)
        self._all_cells.copy(self._owned[0], sequence, 0, self.table.n_committed)
        self._owned.append(sequence)
        return sequence

    def _check_window(self) -> None:
        window = self._all_cells.window
        if 0 < window <= self.table.max_depth:
            raise BackendError(
                f"a draft of {self.table.max_depth} tokens in a row is longer than the model's "
                f"sliding window of {window}: draft fewer tokens"
            )

    # --- shrinking -------------------------------------------------------------------------

    def commit(self, path: Sequence[int], keep: Collection[int] = ()) -> None:
        """See SequenceKV.commit. Raises BackendError, and changes nothing, for an invalid path."""
        start = self.table.n_committed
        rows = self.table.commit(path, keep)
        end = self.table.n_committed
        alive = set(self.table.ids)
        source = self._through[path[-1]] if path else self._owned[0]
        gone = [s for s, leaf in self._ends.items() if leaf not in alive]
        survivors = [s for s in self._ends if s not in set(gone)]
        remaining = [s for s in self._owned if s not in survivors and s != source]
        for sequence in gone:
            self._all_cells.remove(sequence, end if path and sequence == source else start)
            del self._ends[sequence]
        if path:
            for sequence in remaining:
                self._all_cells.copy(source, sequence, start, end)
        self._keep(start, rows)

    def prune(self, nodes: Collection[int]) -> None:
        """See SequenceKV.prune."""
        before = {s: self.table.path(leaf) for s, leaf in self._ends.items()}
        rows = self.table.prune(nodes)
        alive = set(self.table.ids)
        deepest = {s: max(alive.intersection(path), default=PREFIX) for s, path in before.items()}
        gone = {s: node for s, node in deepest.items() if node != self._ends[s]}
        covered = {n for s, path in before.items() if s not in gone for n in path}
        # The deepest first: a sequence that stays has the nodes that others would end at.
        for sequence in sorted(gone, key=lambda s: -self._end_of(gone[s])):
            node = gone[sequence]
            if node == PREFIX or node in covered:
                self._all_cells.remove(sequence, self.table.n_committed)
                del self._ends[sequence]
            else:
                self._all_cells.remove(sequence, self._end_of(node))
                self._ends[sequence] = node
                covered.update(self.table.path(node))
        self._keep(self.table.n_committed, rows)

    def _keep(self, start: int, rows: Sequence[int]) -> None:
        """Keep these of the cells from `start` on, in this order; release the others."""
        before, cached = self.cells[start:], set(rows)
        self.cells[start:] = [before[row] for row in rows]
        self._all_cells.release_cells(
            self, [cell for i, cell in enumerate(before) if i not in cached]
        )
        path = self.table.path
        self._through = {n: s for s, leaf in self._ends.items() for n in path(leaf)}
        self.check_integrity()

    def restorable(self, length: int) -> int:
        return length

    @property
    def snapshot_lengths(self) -> tuple[int, ...]:
        return (self.table.n_committed,)

    def rollback(self, length: int) -> None:
        """See SequenceKV.rollback."""
        self.table.rollback(length)
        self._drop_from(length)

    def abort(self, n_intact: int | None = None) -> None:
        """Drop every live node, and cells that a failed pass left after the prefix.

        n_intact: committed tokens that the failed operation did not touch; None: all.
        """
        if n_intact is not None:
            self.table.cut(n_intact)
        self.table.drop_live()
        self._drop_from(self.table.n_committed)

    def _drop_from(self, length: int) -> None:
        for sequence in self._owned:
            self._all_cells.remove(sequence, length)
        self._all_cells.empty_scratch()
        self._all_cells.release_cells(self, self.cells[length:])
        del self.cells[length:]
        self._ends, self._through = {}, {}
        if not length:
            self.give_idle()
        self.check_integrity()

    # --- prefixes and ends -----------------------------------------------------------------

    def append(self, token_ids: Sequence[int]) -> None:
        """Append tokens whose cells a pass has written to the prefix."""
        self.table.append(token_ids)

    def adopt(self, token_ids: Sequence[int]) -> None:
        """Make these tokens, which the first sequence was filled with, an empty store's prefix."""
        self.table.append(token_ids)
        self._all_cells.grow([self] * len(token_ids), range(len(token_ids)))
        for sequence in self._owned[1:]:
            self._all_cells.copy(self._owned[0], sequence, 0, len(token_ids))
        self.check_integrity()

    def fork(self, length: int) -> CellStore:
        """Return a store that shares the cells of the first `length` tokens of the prefix."""
        other = CellStore(self._all_cells)
        for sequence in other._owned:
            self._all_cells.copy(self._owned[0], sequence, 0, length)
        other.table.append(self.table.committed[:length])
        other.cells = self.cells[:length]
        for cell in other.cells:
            cell.users.append(other)
        other.check_integrity()
        return other

    def give_idle(self) -> None:
        """Release sequences without a leaf, down to MIN_IN_USE."""
        for sequence in self._idle[::-1]:
            if len(self._owned) > MIN_IN_USE:
                self._owned.remove(sequence)
                self._all_cells.give_back(sequence)

    def close(self) -> None:
        """Mark the store as finished; its cells are released when they are needed (see Cells)."""
        self.abort()
        self.give_idle()
        self.table.rollback(0)
        self.has_ended = True
        self._all_cells.end(self)

    def free(self) -> None:
        """Release the cells and sequences of a finished store."""
        while self._owned:
            self._all_cells.give_back(self._owned[-1])
            self._owned.pop()
        self._all_cells.release_cells(self, self.cells)
        self.cells = []

    # --- llama.cpp's cells -----------------------------------------------------------------

    def live_cells(self) -> dict[Cell, list[int]]:
        """Return the cells of live nodes, with the sequences that each belongs to."""
        paths = {s: set(self.table.path(leaf)) for s, leaf in self._ends.items()}
        # The last nodes have no cells yet if a pass is still to compute them.
        live = zip(self.table.ids, self.cells[self.table.n_committed :], strict=False)
        return {cell: [s for s, path in paths.items() if node in path] for node, cell in live}

    def check_integrity(self) -> None:
        """Raise RuntimeError unless all sequences have the expected positions in llama.cpp."""
        lengths = dict.fromkeys(self._owned, self.table.n_committed)
        lengths.update({s: self._end_of(leaf) for s, leaf in self._ends.items()})
        self._all_cells.check_lengths(lengths)
        if len(self.cells) != self.table.num_tokens:
            raise RuntimeError(
                f"a sequence of {self.table.num_tokens} tokens has {len(self.cells)} cells"
            )

    def _end_of(self, node: int) -> int:
        """Return the position after a live node."""
        return self.table.n_committed + len(self.table.path(node))
