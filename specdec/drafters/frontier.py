"""Frontier: the nodes of a growing tree that the draft should run next.

A child is never more probable than its parent, so the best `n` known nodes are the best subtree of
that size. Every known node is queued once: growing a tree of n nodes takes n log n steps in all,
however many levels it is run in.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace
from itertools import islice

import numpy as np

from specdec.drafters.grown_tree import GrownNode, GrownTree

Pair = tuple[GrownNode, GrownNode]
"""A node's parent, and the node."""
Level = list[Pair]
"""Nodes that the draft runs in one pass."""
_MIN_WIDTH = 32
"""Nodes that the draft may run at a time; more make a level slow and add little ..."""
_WIDTH_SHARE = 8
"""... unless the tree is large: it is grown in about this many levels more than its depth."""


def level_width(n_nodes: int) -> int:
    """Return the maximum nodes that the draft runs at a time for trees of `n_nodes`."""
    return max(_MIN_WIDTH, n_nodes // _WIDTH_SHARE)


class Frontier:
    """Priority queue of a tree's known nodes that were not run yet, the most probable first.

    Args:
        tree: the nodes known so far; `add` announces later ones.
        max_depth: levels of the tree; nodes of the last one need not be run.
        width: maximum children considered per node; all when None.
        n_best: run only nodes among the `n_best` best; any when None. Then children are queued one
            after another, as those before them are taken.
    """

    def __init__(
        self,
        tree: GrownTree,
        max_depth: int,
        width: int | None = None,
        n_best: int | None = None,
    ) -> None:
        self.deepest = tree.deepest(max_depth)
        self._width = width
        self._n_best = n_best
        self._best: list[float] = []  # heap of the best nodes' path_log_prob, the worst first
        self._waiting: list[tuple[float, int, GrownNode, GrownNode, Iterator[GrownNode]]] = []
        self._n_seen = 0  # tie-break: the node that was found first
        if n_best is None:
            self.add(tree.root)
            return
        # Nodes below another drafter's node that was not run are queued when it is run.
        known = (pair for pair in tree.best_first(max_depth, width) if pair[0].is_run)
        for parent, node in islice(known, n_best):
            self._count(node)
            if not node.is_run:
                self._await(parent, node, iter(()))

    def take(self, n: int, min_share: float = 0.0) -> Level:
        """Remove and return up to `n` nodes to run together, the most probable first.

        min_share: minimum probability of a node, relative to the first one's.
        """
        level: Level = []
        minimum = -np.inf
        while self._waiting and len(level) < n:
            _, _, parent, node, siblings = self._waiting[0]
            if node.path_log_prob <= self._worst or node.path_log_prob < minimum:
                break
            heappop(self._waiting)
            self._look_at(parent, siblings)
            if node.is_run:
                self.add(node)
                continue
            if not level and min_share > 0.0:
                minimum = node.path_log_prob + np.log(min_share)
            level.append((parent, node))
        return level

    def add(self, node: GrownNode) -> None:
        """Queue the children of a node that was run."""
        if node.position >= self.deepest:
            return
        self._look_at(node, node.likeliest(self._width))

    def _look_at(self, parent: GrownNode, siblings: Iterator[GrownNode]) -> None:
        """Queue children: all that are among the best, or only the next one without `n_best`."""
        for child in siblings:
            if child.path_log_prob <= self._worst:
                return
            self._count(child)
            self._await(parent, child, siblings)
            if self._n_best is None:
                return

    @property
    def _worst(self) -> float:
        """Log probability that a node has to exceed to be among the best."""
        if self._n_best is None or len(self._best) < self._n_best:
            return -np.inf
        return self._best[0] if self._best else np.inf

    def _count(self, node: GrownNode) -> None:
        if self._n_best is None:
            return
        if len(self._best) < self._n_best:
            heappush(self._best, node.path_log_prob)
        else:
            heapreplace(self._best, node.path_log_prob)

    def _await(self, parent: GrownNode, node: GrownNode, siblings: Iterator[GrownNode]) -> None:
        if node.position < self.deepest:
            self._n_seen += 1
            entry = (-node.path_log_prob, self._n_seen, parent, node, siblings)
            heappush(self._waiting, entry)
