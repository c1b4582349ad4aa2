"""Bookkeeping of tentative nodes: which rows of a KV cache they occupy and who sees whom.

    rows of the cache:  [ committed prefix | live nodes, in order of arrival ]
                          0 .. n_committed-1   n_committed ..

The table holds no tensors. A cache executes the row moves that `commit` and `prune` return, so
that the arithmetic of trees lives in one place and can be tested without a model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from backends.contract.backend import PREFIX, BackendError


def table_bytes(max_nodes: int) -> int:
    """Memory of a `NodeTable`: who sees whom is a byte for each pair of nodes, and a copy of it
    while nodes come or go."""
    return 2 * max_nodes**2


class NodeTable:
    """Live nodes in row order, their parents, depths and ancestors."""

    def __init__(self) -> None:
        self.committed: list[int] = []
        """Token ids of the prefix, in order; the one record of how long it is."""
        self.next_id = 0
        self.parents: dict[int, int] = {}
        """Of each live node; PREFIX where it follows the last committed token."""
        self._ids: list[int] = []
        self._tokens: list[int] = []
        self._depths: list[int] = []
        self._ancestors = np.zeros((0, 0), dtype=bool)  # [live, live], own column included

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def n_committed(self) -> int:
        return len(self.committed)

    @property
    def num_tokens(self) -> int:
        """Rows in use: committed and live."""
        return self.n_committed + len(self._ids)

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self._ids)

    @property
    def max_depth(self) -> int:
        """Tokens on the longest live path."""
        return 1 + max(self._depths) if self._depths else 0

    def positions(self, start: int = 0) -> np.ndarray:
        """Positions in the sequence of the live nodes from `start` on, int64 [live - start]."""
        return self.n_committed + np.asarray(self._depths[start:], dtype=np.int64)

    def visible(self, start: int = 0) -> np.ndarray:
        """Which live nodes each live node from `start` on attends to, bool [live - start, live]."""
        return self._ancestors[start:]

    def path(self, node: int) -> list[int]:
        """Ids from the prefix down to a live node, itself included."""
        path = []
        while node != PREFIX:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def append(self, token_ids: Sequence[int]) -> None:
        """Lengthen the prefix by tokens that were no nodes before: a prompt's."""
        self.committed += [int(token) for token in token_ids]

    def cut(self, length: int) -> None:
        """Shorten the prefix to `length` tokens, if it is longer."""
        del self.committed[length:]

    def add(self, parents: Sequence[int], token_ids: Sequence[int]) -> list[int]:
        """Append nodes with these tokens below `parents`; return their ids.

        Unknown parents raise, adding nothing.
        """
        ids, rows = list(range(self.next_id, self.next_id + len(parents))), self._rows()
        above = self._rows_above(ids, parents, rows)
        old, total = len(self._ids), len(self._ids) + len(parents)
        grown = np.zeros((total, total), dtype=bool)
        grown[:old, :old] = self._ancestors
        for row, parent in enumerate(above, start=old):
            if parent != PREFIX:
                grown[row] = grown[parent]
            grown[row, row] = True
            self._depths.append(0 if parent == PREFIX else self._depths[parent] + 1)
        self._ids += ids
        self._tokens += [int(token) for token in token_ids]
        self.parents.update(zip(ids, parents, strict=True))
        self._ancestors = grown
        self.next_id += len(ids)
        return ids

    def commit(self, path: Sequence[int], keep: Collection[int] = ()) -> list[int]:
        """Move `path` into the prefix; return the old live rows in their new order.

        The first len(path) of them are the committed ones, the others stay live.
        """
        rows = self._rows()
        self._check_chain(path, rows)
        cached = self._subtrees(keep, rows, below=path[-1] if path else PREFIX)
        order = [rows[node] for node in path] + cached
        self.committed += [self._tokens[rows[node]] for node in path]
        self._select(cached, root=path[-1] if path else PREFIX, lift=len(path))
        return order

    def prune(self, nodes: Collection[int]) -> list[int]:
        """Drop `nodes` and what is below them; return the old live rows that remain."""
        rows = self._rows()
        for node in nodes:
            self._require(node, rows)
        doomed = [rows[node] for node in nodes]
        keep = [r for r in range(len(self)) if not self._ancestors[r, doomed].any()]
        self._select(keep)
        return keep

    def rollback(self, length: int) -> None:
        """Cut the prefix to `length` tokens and drop all live nodes."""
        if not 0 <= length <= self.n_committed:
            raise BackendError(f"cannot roll back to {length}: {self.n_committed} are committed")
        self.cut(length)
        self.drop_live()

    def drop_live(self) -> None:
        self._select([])

    def _rows(self) -> dict[int, int]:
        return {node: row for row, node in enumerate(self._ids)}

    @staticmethod
    def _rows_above(
        ids: Sequence[int], parents: Sequence[int], rows: Mapping[int, int]
    ) -> list[int]:
        """Rows of the parents of new nodes, PREFIX where there is none; `rows`: of those before."""
        known, above = dict(rows), []
        for node, parent in zip(ids, parents, strict=True):
            if parent != PREFIX and parent not in known:
                raise BackendError(f"node {node} has parent {parent}, which is not a live node")
            above.append(PREFIX if parent == PREFIX else known[parent])
            known[node] = len(known)
        return above

    @staticmethod
    def _require(node: int, rows: dict[int, int]) -> None:
        if node not in rows:
            raise BackendError(f"{node} is not a live node")

    def _check_chain(self, path: Sequence[int], rows: dict[int, int]) -> None:
        above = PREFIX
        for node in path:
            self._require(node, rows)
            if self.parents[node] != above:
                raise BackendError(f"path {list(path)} is not a chain from the prefix: {node}")
            above = node

    def _subtrees(self, roots: Collection[int], rows: dict[int, int], below: int) -> list[int]:
        """Rows of the subtrees at `roots`, which must be children of `below`, in row order."""
        for node in roots:
            self._require(node, rows)
            if self.parents[node] != below:
                raise BackendError(f"cannot keep node {node}: it is no child of the path's end")
        columns = [rows[node] for node in roots]
        return [r for r in range(len(self)) if self._ancestors[r, columns].any()]

    def _select(self, rows: list[int], root: int = PREFIX, lift: int = 0) -> None:
        """Keep these rows; nodes whose parent was `root` now follow the prefix."""
        self._ids = [self._ids[r] for r in rows]
        self._tokens = [self._tokens[r] for r in rows]
        above = ((node, self.parents[node]) for node in self._ids)
        self.parents = {node: PREFIX if parent == root else parent for node, parent in above}
        self._depths = [self._depths[r] - lift for r in rows]
        self._ancestors = self._ancestors[np.ix_(rows, rows)]
