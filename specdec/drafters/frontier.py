"""Frontier: which nodes of a growing tree the draft should run next.

A child is never more probable than its parent, so the best `n` nodes of all that are known are the
best subtree of that size. Every known node is put in order once: growing a tree of n nodes takes
n log n steps in all, however many levels it is run in.
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
"""What the draft runs together."""


class Frontier:
    """Known nodes of a tree that were not run yet, the most probable first.

    Args:
        tree: what is known by now; `add` tells of what is offered later.
        max_depth: levels of the tree; of the last one no node has to be run.
        width: children of a node that count; all when None.
        n_best: only nodes among so many best ones are worth running; any when None. Then children
            are looked at one after another, as those before them are taken.
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
        self._n_seen = 0  # of equals, the one that was found first
        if n_best is None:
            self.add(tree.root)
            return
        # What hangs below a node that was not run, another drafter's, comes with that node.
        known = (pair for pair in tree.best_first(max_depth, width) if pair[0].is_run)
        for parent, node in islice(known, n_best):
            self._count(node)
            if not node.is_run:
                self._await(parent, node, iter(()))

    def take(self, n: int, min_share: float = 0.0) -> Level:
        """Up to `n` nodes to run together, the most probable first; they wait no longer.

        least_share: of the likeliest one's probability, for another to be run together with it.
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
        """The node was run: its children are known now."""
        if node.position >= self.deepest:
            return
        self._look_at(node, node.likeliest(self._width))

    def _look_at(self, parent: GrownNode, siblings: Iterator[GrownNode]) -> None:
        """Let children wait: all that are among the best, or the next one where any may be."""
        for child in siblings:
            if child.path_log_prob <= self._worst:
                return
            self._count(child)
            self._await(parent, child, siblings)
            if self._n_best is None:
                return

    @property
    def _worst(self) -> float:
        """What a node has to exceed to be among the best: an equal one was there before."""
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
