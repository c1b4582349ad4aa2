"""Trees over marginals: the likeliest nodes where each level has one distribution (DDTree).

A head that fills a block in one pass gives p_i(token) for the i-th next token, whatever the tokens
before it are. So every node of a level has the same candidates, a node's probability is the product
along its path, and the best n nodes come from a heap, without further passes (arXiv 2604.12989).

DFlash 2 gives p_i(token | the token before it) for a few tokens of each level, so that candidates
depend on the parent alone; the heap is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from specdec.drafters.candidates import Candidates
from specdec.verification.tree import ROOT, DraftTree

CandidatesAfter = Callable[[Sequence[int]], Candidates]
"""Return the candidates, likeliest first, after these tokens below the root."""


class Transitions:
    """Scores of the likeliest tokens of each position of a block after one another.

    rows: float32 [n, top_k + top_k * top_k]: see MaskedBlock.top_k.
    """

    def __init__(self, rows: NDArray[np.float32], top_k: int) -> None:
        self._tokens = rows[:, :top_k].astype(np.int64)
        self._scores = rows[:, top_k:].reshape(-1, top_k, top_k)

    def __len__(self) -> int:
        return len(self._tokens)

    def after(self, path: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return (tokens, their scores) [top_k] that may follow these tokens below the root."""
        depth = len(path)
        before = 0 if not path else int(np.argmax(self._tokens[depth - 1] == path[-1]))
        return self._tokens[depth], self._scores[depth, before]


def best_tree(
    root: int, candidates_after: CandidatesAfter, max_nodes: int, max_depth: int
) -> DraftTree:
    """Return the tree of the `max_nodes` most probable nodes down to `max_depth` levels.

    A node is no more probable than its parent and its likelier siblings. So the heap contains, of
    each taken node, its likeliest child and its next sibling. Ties go to the one that was pushed
    first.
    """
    tree = DraftTree(root)
    heap: list[tuple[float, int, int, int, Candidates]] = []
    n_pushed = 0

    def push(parent: int, rank: int, candidates: Candidates) -> None:
        """Queue the candidate with this rank below a node of the tree."""
        nonlocal n_pushed
        if rank < len(candidates):
            log_prob = tree.path_log_probs[parent] + candidates[rank][1]
            heappush(heap, (-log_prob, n_pushed, parent, rank, candidates))
            n_pushed += 1

    if max_depth > 0:
        push(ROOT, 0, candidates_after(()))
    while heap and tree.n_drafted < max_nodes:
        _, _, parent, rank, candidates = heappop(heap)
        node = tree.add(parent, *candidates[rank])
        push(parent, rank + 1, candidates)
        if tree.depths[node] < max_depth:
            push(node, 0, candidates_after(tree.tokens_on_path(node)))
    return tree
