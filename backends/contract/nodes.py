"""Node table: the rows of a KV cache that tentative nodes occupy, and their attention mask.

    rows of the cache:  [ committed prefix | live nodes, in order of arrival ]
                          0 .. n_committed-1   n_committed ..

The table has no tensors. A cache executes the row moves that `commit` and `prune` return, so that
the bookkeeping of trees is in one place and can be tested without a model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from backends.contract.backend import PREFIX, BackendError


def table_bytes(max_nodes: int) -> int:
    """Return the bytes of a `NodeTable`: a mask with a byte for each pair of nodes, and a copy of
    it while nodes are added or dropped."""
    return 2 * max_nodes**2


class NodeTable:
    """Live nodes in row order, their parents, depths and ancestors."""

    def __init__(self) -> None:
        self.committed: list[int] = []
        """Token ids of the prefix, in order; its length is the length of the prefix."""
        self.next_id = 0
        self.parents: dict[int, int] = {}
        """Parent of each live node; PREFIX if it follows the last committed token."""
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
        """Committed tokens and live nodes."""
        return self.n_committed + len(self._ids)

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self._ids)

    @property
    def max_depth(self) -> int:
        """Number of nodes on the longest live path."""
        return 1 + max(self._depths) if self._depths else 0

    def positions(self, start: int = 0) -> np.ndarray:
        """Return the sequence positions of live nodes from `start` on, int64 [live - start]."""
        return self.n_committed + np.asarray(self._depths[start:], dtype=np.int64)

    def visible(self, start: int = 0) -> np.ndarray:
        """Return the attention mask of live nodes from `start` on, bool [live - start, live]."""
        return self._ancestors[start:]

    def rows_above(self) -> list[int]:
        """Return the row of each live node's parent among them; -1 for the prefix."""
        rows = self._rows()
        return [rows.get(self.parents[node], -1) for node in self._ids]

    def path(self, node: int) -> list[int]:
        """Return the ids from the prefix down to a live node, including it."""
        path = []
        while node != PREFIX:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def append(self, token_ids: Sequence[int]) -> None:
        """Append tokens that were no nodes (a prompt's) to the prefix."""
        self.committed += [int(token) for token in token_ids]

    def cut(self, length: int) -> None:
        """Shorten the prefix to `length` tokens, if it is longer."""
        del self.committed[length:]

    def add(self, parents: Sequence[int], token_ids: Sequence[int]) -> list[int]:
        """Append nodes with these tokens below `parents`; return their ids.

        Raises BackendError, and adds nothing, for an unknown parent.
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

        The first len(path) of them are committed now, the others stay live.
        """
        rows = self._rows()
        self._check_chain(path, rows)
        kept_rows = self._subtrees(keep, rows, below=path[-1] if path else PREFIX)
        order = [rows[node] for node in path] + kept_rows
        self.committed += [self._tokens[rows[node]] for node in path]
        self._select(kept_rows, root=path[-1] if path else PREFIX, lift=len(path))
        return order

    def prune(self, nodes: Collection[int]) -> list[int]:
        """Drop `nodes` and their subtrees; return the old live rows that remain."""
        rows = self._rows()
        for node in nodes:
            self._require(node, rows)
        pruned = [rows[node] for node in nodes]
        keep = [r for r in range(len(self)) if not self._ancestors[r, pruned].any()]
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
        """Return the rows of new nodes' parents, or PREFIX; `rows`: those of existing nodes."""
        all_rows, above = dict(rows), []
        for node, parent in zip(ids, parents, strict=True):
            if parent != PREFIX and parent not in all_rows:
                raise BackendError(f"node {node} has parent {parent}, which is not a live node")
            above.append(PREFIX if parent == PREFIX else all_rows[parent])
            all_rows[node] = len(all_rows)
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
        """Return the rows of the subtrees at `roots`, children of `below`, in row order."""
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
