"""DraftTree: the candidate tokens that one pass of the target verifies.

    index       0 (root)   1     2     3           root = the pending token: already emitted,
    token_ids   "the"     cat   dog   sat          its KV not computed yet
    parents     -1         0     0     1           parents[i] < i, siblings have distinct tokens

A chain is a tree of width one. Nothing here knows about models: log q comes from the drafter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

ROOT = 0
ROOT_SOURCE = "root"
DRAFT_SOURCE = "draft"


class DraftTree:
    """A growing tree of tokens; indices are stable and every parent comes before its children.

    Attributes (lists of one entry per node; read them, change them only through `add`):
        token_ids: the nodes' tokens.
        parents: index of each node's parent, -1 for the root.
        log_probs: log q(token | parent's prefix), at most 0; the root has 0.
        path_log_probs: sum of log_probs from the root to the node.
        depths: edges between root and node.
        sources: drafters that proposed the node: ("root",), ("draft",), ("draft", "ngram"), ...
        draft_probs: the full row q the token was drawn from, float64 [vocab], where the acceptance
            rule needs it, else None.
        n_runs: passes of a draft model that the tree took; n_run_nodes: their tokens.
    """

    __slots__ = (
        "token_ids",
        "parents",
        "log_probs",
        "path_log_probs",
        "depths",
        "sources",
        "draft_probs",
        "n_runs",
        "n_run_nodes",
        "_children",
    )

    def __init__(self, root_token: int) -> None:
        self.token_ids: list[int] = [int(root_token)]
        self.parents: list[int] = [-1]
        self.log_probs: list[float] = [0.0]
        self.path_log_probs: list[float] = [0.0]
        self.depths: list[int] = [0]
        self.sources: list[tuple[str, ...]] = [(ROOT_SOURCE,)]
        self.draft_probs: list[NDArray[np.float64] | None] = [None]
        self.n_runs = self.n_run_nodes = 0
        self._children: list[dict[int, int]] = [{}]

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def n_drafted(self) -> int:
        """Nodes below the root."""
        return len(self.token_ids) - 1

    @property
    def is_chain(self) -> bool:
        return all(len(children) <= 1 for children in self._children)

    def add(
        self,
        parent: int,
        token_id: int,
        log_prob: float,
        source: str | tuple[str, ...] = DRAFT_SOURCE,
        draft_probs: NDArray[np.float64] | None = None,
    ) -> int:
        """Add a candidate below `parent` and return its index.

        Where `parent` has a child with this token already, that child is returned: it has one more
        source, and the larger of the log-probabilities. Raises IndexError for an unknown parent and
        ValueError for a log-probability that is not a number ≤ 0.
        """
        if not 0 <= parent < len(self.token_ids):
            raise IndexError(f"parent {parent} is not one of the tree's {len(self)} nodes")
        token_id = int(token_id)
        log_prob = min(float(log_prob), 0.0)  # NaN stays NaN: min() returns its first argument
        if log_prob != log_prob:
            raise ValueError(f"log-probability of token {token_id} is not a number")
        sources = (source,) if isinstance(source, str) else source
        existing = self._children[parent].get(token_id)
        if existing is not None:
            self._merge(existing, log_prob, sources, draft_probs)
            return existing
        index = len(self.token_ids)
        self._children[parent][token_id] = index
        self._children.append({})
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.log_probs.append(log_prob)
        self.path_log_probs.append(self.path_log_probs[parent] + log_prob)
        self.depths.append(self.depths[parent] + 1)
        self.sources.append(sources)
        self.draft_probs.append(draft_probs)
        return index

    def _merge(
        self,
        index: int,
        log_prob: float,
        sources: tuple[str, ...],
        draft_probs: NDArray[np.float64] | None,
    ) -> None:
        known = self.sources[index]
        self.sources[index] = (*known, *(source for source in sources if source not in known))
        if self.draft_probs[index] is None:
            self.draft_probs[index] = draft_probs
        if log_prob <= self.log_probs[index]:
            return
        self.log_probs[index] = log_prob
        for i in range(index, len(self)):  # parents first, so one sweep updates the subtree
            if i == index or self.depths[i] > self.depths[index]:
                self.path_log_probs[i] = self.path_log_probs[self.parents[i]] + self.log_probs[i]

    def children(self, index: int) -> dict[int, int]:
        """Return {token id: node index} of a node's children, in the order they were added."""
        return self._children[index]

    def path(self, index: int) -> tuple[int, ...]:
        """Return the node indices from the root to `index`, both included."""
        nodes = []
        while index >= 0:
            nodes.append(index)
            index = self.parents[index]
        return tuple(reversed(nodes))

    def tokens_on_path(self, index: int) -> tuple[int, ...]:
        """Return the draft tokens from below the root to `index`."""
        return tuple(self.token_ids[i] for i in self.path(index)[1:])

    def follow(self, tokens: Iterable[int]) -> tuple[int, ...]:
        """Return the path from the root along `tokens`, as far as the tree contains them."""
        nodes = [ROOT]
        for token in tokens:
            child = self._children[nodes[-1]].get(token)
            if child is None:
                break
            nodes.append(child)
        return tuple(nodes)

    def best_indices(self, n: int) -> list[int]:
        """Return the root and the `n` most probable nodes by path probability, in index order.

        A child is never more probable than its parent and comes after it, so they are a subtree:
        the one of n nodes with the largest expected accepted length.
        """
        order = sorted(range(1, len(self)), key=lambda i: (-self.path_log_probs[i], i))
        return [ROOT, *sorted(order[: max(n, 0)])]

    def best_subset(self, n: int) -> DraftTree:
        """Return a tree of the root and the `n` most probable nodes (see `best_indices`)."""
        return self if n >= self.n_drafted else self.subset(self.best_indices(n))

    def subset(self, indices: Sequence[int]) -> DraftTree:
        """Return a new tree of these nodes: ascending, parents included, starting with the root."""
        tree = DraftTree(self.token_ids[ROOT])
        tree.n_runs, tree.n_run_nodes = self.n_runs, self.n_run_nodes
        new_index = {ROOT: ROOT}
        for i in indices:
            if i == ROOT:
                continue
            if self.parents[i] not in new_index:
                raise ValueError(f"node {i} is kept without its parent {self.parents[i]}")
            new_index[i] = tree.add(
                new_index[self.parents[i]],
                self.token_ids[i],
                self.log_probs[i],
                self.sources[i],
                self.draft_probs[i],
            )
        return tree
