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

Several sequences share the cache. Each has sequences of its own, so that none sees another's cells; a
fork shares the cells of a prefix. The order of all cells is kept in cells.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from backends.contract.backend import PREFIX, BackendError
from backends.contract.nodes import NodeTable
from backends.llama.cells import Cell, Cells

MIN_IN_USE = 2
"""A sliding-window cache reuses cells of a single sequence once they are out of its window; with
two sequences on every committed cell a rollback finds all of them."""


class CellStore:
    """Which sequence holds which live node of a text, kept in step with a `NodeTable`."""

    def __init__(self, capacity: Cells) -> None:
        self.table = NodeTable()
        self.cells: list[Cell] = []
        self.has_ended = False
        self.new: list[list[int]] = []
        """Sequences of each node that was added last."""
        self._capacity = capacity
        self._owned = capacity.take_sequences(MIN_IN_USE)
        self._ends: dict[int, int] = {}  # busy sequence -> the leaf that it ends at
        self._through: dict[int, int] = {}  # live node -> a sequence that holds it
        capacity.add(self)

    @property
    def in_use(self) -> list[int]:
        """Sequences that hold the prefix: a committed token belongs to all of them."""
        return list(self._owned)

    @property
    def _idle(self) -> list[int]:
        return [sequence for sequence in self._owned if sequence not in self._ends]

    @property
    def n_needed(self) -> int:
        """Sequences that it cannot do without now."""
        return max(MIN_IN_USE, len(self._ends))

    def n_leaves_with(self, parents: Sequence[int]) -> int:
        """Leaves that its tree has once nodes with these parents were added."""
        first, inner = self.table.next_id, set(parents)
        leaves = [*self._ends.values(), *range(first, first + len(parents))]
        return sum(node not in inner for node in leaves)

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
            self._capacity.copy(source, sequence, self.table.n_committed, self._end_of(node))
        return sequence

    def _fresh(self) -> int:
        if idle := self._idle:
            return idle[0]
        (sequence,) = self._capacity.take_sequences(1)
        self._capacity.copy(self._owned[0], sequence, 0, self.table.n_committed)
        self._owned.append(sequence)
        return sequence

    def _check_window(self) -> None:
        window = self._capacity.window
        if 0 < window <= self.table.max_depth:
            raise BackendError(
                f"a draft of {self.table.max_depth} tokens in a row is longer than the model's "
                f"sliding window of {window}: draft fewer tokens"
            )

    # --- shrinking -------------------------------------------------------------------------

    def commit(self, path: Sequence[int], keep: Collection[int] = ()) -> None:
        """See Text.commit. Raises BackendError, and changes nothing, for an invalid path."""
        start = self.table.n_committed
        rows = self.table.commit(path, keep)
        end = self.table.n_committed
        alive = set(self.table.ids)
        source = self._through[path[-1]] if path else self._owned[0]
        gone = [s for s, leaf in self._ends.items() if leaf not in alive]
        survivors = [s for s in self._ends if s not in set(gone)]
        rest = [s for s in self._owned if s not in survivors and s != source]
        for sequence in gone:
            self._capacity.remove(sequence, end if path and sequence == source else start)
            del self._ends[sequence]
        if path:
            for sequence in rest:
                self._capacity.copy(source, sequence, start, end)
        self._keep(start, rows)

    def prune(self, nodes: Collection[int]) -> None:
        """See Text.prune."""
        before = {s: self.table.path(leaf) for s, leaf in self._ends.items()}
        rows = self.table.prune(nodes)
        alive = set(self.table.ids)
        deepest = {s: max(alive.intersection(path), default=PREFIX) for s, path in before.items()}
        gone = {s: node for s, node in deepest.items() if node != self._ends[s]}
        pinned = {n for s, path in before.items() if s not in gone for n in path}
        # The deepest first: where it stays, it holds the nodes that others would end at.
        for sequence in sorted(gone, key=lambda s: -self._end_of(gone[s])):
            node = gone[sequence]
            if node == PREFIX or node in pinned:
                self._capacity.remove(sequence, self.table.n_committed)
                del self._ends[sequence]
            else:
                self._capacity.remove(sequence, self._end_of(node))
                self._ends[sequence] = node
                pinned.update(self.table.path(node))
        self._keep(self.table.n_committed, rows)

    def _keep(self, start: int, rows: Sequence[int]) -> None:
        """Of the cells from `start` on these remain, in this order."""
        before, cached = self.cells[start:], set(rows)
        self.cells[start:] = [before[row] for row in rows]
        self._capacity.let_go(self, [cell for i, cell in enumerate(before) if i not in cached])
        path = self.table.path
        self._through = {n: s for s, leaf in self._ends.items() for n in path(leaf)}
        self.check_integrity()

    def rollback(self, length: int) -> None:
        """See Text.rollback."""
        self.table.rollback(length)
        self._drop_from(length)

    def abort(self, n_intact: int | None = None) -> None:
        """Drop every live node, and cells that a broken pass left behind the prefix.

        n_intact: committed tokens that an operation left alone that broke off; None: all.
        """
        if n_intact is not None:
            self.table.cut(n_intact)
        self.table.drop_live()
        self._drop_from(self.table.n_committed)

    def _drop_from(self, length: int) -> None:
        for sequence in self._owned:
            self._capacity.remove(sequence, length)
        self._capacity.empty_scratch()
        self._capacity.let_go(self, self.cells[length:])
        del self.cells[length:]
        self._ends, self._through = {}, {}
        if not length:
            self.give_idle()
        self.check_integrity()

    # --- prefixes and ends -----------------------------------------------------------------

    def append(self, token_ids: Sequence[int]) -> None:
        """Tokens whose cells a pass has written: they are the end of the prefix."""
        self.table.append(token_ids)

    def adopt(self, token_ids: Sequence[int]) -> None:
        """The first sequence of an empty text was filled with these tokens: they are the prefix."""
        self.table.append(token_ids)
        self._capacity.grow([self] * len(token_ids), range(len(token_ids)))
        for sequence in self._owned[1:]:
            self._capacity.copy(self._owned[0], sequence, 0, len(token_ids))
        self.check_integrity()

    def fork(self, length: int) -> CellStore:
        """Another text with the first `length` tokens of the prefix, whose cells both hold."""
        other = CellStore(self._capacity)
        for sequence in other._owned:
            self._capacity.copy(self._owned[0], sequence, 0, length)
        other.table.append(self.table.committed[:length])
        other.cells = self.cells[:length]
        for cell in other.cells:
            cell.users.append(other)
        other.check_integrity()
        return other

    def give_idle(self) -> None:
        """Give back sequences without a leaf, down to as many as the prefix needs."""
        for sequence in self._idle[::-1]:
            if len(self._owned) > MIN_IN_USE:
                self._owned.remove(sequence)
                self._capacity.give_back(sequence)

    def close(self) -> None:
        """The text ends; its cells are given back when they are needed (see Cells)."""
        self.abort()
        self.give_idle()
        self.table.rollback(0)
        self.has_ended = True
        self._capacity.end(self)

    def free(self) -> None:
        """Give back the cells and sequences of an ended text."""
        while self._owned:
            self._capacity.give_back(self._owned[-1])
            self._owned.pop()
        self._capacity.let_go(self, self.cells)
        self.cells = []

    # --- what llama.cpp has ----------------------------------------------------------------

    def live_cells(self) -> dict[Cell, list[int]]:
        """Cells of live nodes, with the sequences that hold each."""
        paths = {s: set(self.table.path(leaf)) for s, leaf in self._ends.items()}
        # The last nodes have no cells yet where a pass is to compute them.
        live = zip(self.table.ids, self.cells[self.table.n_committed :], strict=False)
        return {cell: [s for s, path in paths.items() if node in path] for node, cell in live}

    def check_integrity(self) -> None:
        """Every sequence starts at 0 and ends where it should, as llama.cpp sees it."""
        lengths = dict.fromkeys(self._owned, self.table.n_committed)
        lengths.update({s: self._end_of(leaf) for s, leaf in self._ends.items()})
        self._capacity.check_lengths(lengths)
        if len(self.cells) != self.table.num_tokens:
            raise RuntimeError(
                f"a text of {self.table.num_tokens} tokens and nodes has {len(self.cells)} cells"
            )

    def _end_of(self, node: int) -> int:
        """The position behind a live node."""
        return self.table.n_committed + len(self.table.path(node))
