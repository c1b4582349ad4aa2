"""GrownTree: everything that a draft model has run or could run next, below the pending token.

    root ─┬─ a ─┬─ c       a, b: run, so the candidates after them are known, and their KV is live
          │     └─ d       c, d, e: candidates, not run yet
          └─ b ─── e

A proposal is the most probable part of it. What drafting ahead adds lies below or beside that part:
the possible outcomes of the pass. When one of them comes true, the tree goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import count, islice

from backends.base import PREFIX
from specdec.drafters.candidates import Candidates
from specdec.tree import ROOT, DraftTree


class GrownNode:
    """A token that may come at `position` of the text.

    Attributes:
        log_prob: log of the chance that it follows its parent.
        path_log_prob: sum of them on the way to the node, counted from where the tree began.
        node_id: the backend's, PREFIX once committed; None until the draft has run the node.
        is_run_ahead: the draft ran it beside a pass of the target.
        children: {token: node} of the candidates after it, likeliest first.
    """

    __slots__ = (
        "children",
        "is_run_ahead",
        "log_prob",
        "node_id",
        "path_log_prob",
        "position",
        "token_id",
    )

    def __init__(self, token_id: int, position: int, log_prob: float, above: float) -> None:
        self.token_id = token_id
        self.position = position
        self.log_prob = min(log_prob, 0.0)
        self.path_log_prob = above + self.log_prob
        self.node_id: int | None = None
        self.is_run_ahead = False
        self.children: dict[int, GrownNode] = {}

    @property
    def is_run(self) -> bool:
        return self.node_id is not None

    def offer(self, candidates: Iterable[tuple[int, float]]) -> None:
        """Add candidates that may follow; those that are there stay as they are."""
        for token, log_prob in candidates:
            if token not in self.children:
                child = GrownNode(token, self.position + 1, log_prob, self.path_log_prob)
                self.children[token] = child


class GrownTree:
    """The nodes below a pending token whose KV is the end of the draft's committed prefix."""

    def __init__(self, token_id: int, position: int, candidates: Candidates) -> None:
        self.root = GrownNode(token_id, position, 0.0, 0.0)
        self.root.node_id = PREFIX
        self.root.offer(candidates)
        self.n_live = 0
        """Nodes whose KV the backend holds beside the prefix."""

    def run(self, node: GrownNode, node_id: int, candidates: Candidates) -> None:
        """The backend has run the node: its id there, and what may follow it."""
        node.node_id = node_id
        node.offer(candidates)
        self.n_live += 1

    def best_first(
        self, max_depth: int, width: int | None = None
    ) -> Iterator[tuple[GrownNode, GrownNode]]:
        """(parent, node) of all nodes down to a depth, the most probable first.

        A parent comes before its children, so any beginning of this is prefix-closed; and it is the
        best subtree of its size. width: children of a node that count.
        """
        order = count()  # of equals, the one that was found first
        queue: list[tuple[float, int, GrownNode, GrownNode]] = []
        deepest = self.deepest(max_depth)
        node = self.root
        while True:
            if node.position < deepest:
                for child in islice(node.children.values(), width):
                    heappush(queue, (-child.path_log_prob, next(order), node, child))
            if not queue:
                return
            _, _, parent, node = heappop(queue)
            yield parent, node

    def deepest(self, max_depth: int) -> int:
        """Position of the nodes so many levels below the root."""
        return self.root.position + max_depth

    def log_chance(self, node: GrownNode) -> float:
        """Log of the chance that the text goes on along the path to the node."""
        return node.path_log_prob - self.root.path_log_prob

    def follow(self, tokens: Iterable[int]) -> list[GrownNode]:
        """The nodes along these tokens below the root, as far as the draft has run them."""
        nodes: list[GrownNode] = []
        node: GrownNode | None = self.root
        for token in tokens:
            node = node.children.get(token) if node is not None else None
            if node is None or not node.is_run:
                break
            nodes.append(node)
        return nodes

    def graft(self, tree: DraftTree) -> None:
        """Let the nodes of a tree with the same root be candidates too, whoever proposed them."""
        nodes = [self.root]
        for i in range(1, len(tree)):
            parent, token = nodes[tree.parents[i]], tree.token_ids[i]
            parent.offer([(token, tree.log_probs[i])])
            nodes.append(parent.children[token])

    def move_to(self, root: GrownNode) -> None:
        """The text goes on at `root`, which is committed now; everything beside it is gone."""
        self.root = root
        root.node_id = PREFIX
        self.n_live = _n_run(root) - 1

    def best_tree(self, n: int, max_depth: int, width: int) -> DraftTree:
        """The root and its `n` most probable nodes as a proposal."""
        tree = DraftTree(self.root.token_id)
        indices = {id(self.root): ROOT}
        for parent, node in islice(self.best_first(max_depth, width), n):
            indices[id(node)] = tree.add(indices[id(parent)], node.token_id, node.log_prob)
        return tree


def _n_run(root: GrownNode) -> int:
    """Nodes of a subtree that were run, its root included."""
    nodes, n_found = [root], 0
    while nodes:
        node = nodes.pop()
        n_found += 1
        nodes += [child for child in node.children.values() if child.is_run]
    return n_found
