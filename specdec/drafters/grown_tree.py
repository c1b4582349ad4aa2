"""GrownTree: all nodes that a draft model has run or could run next, below the pending token.

    root ─┬─ a ─┬─ c       a, b: run, so the candidates after them are known, and their KV is live
          │     └─ d       c, d, e: candidates, not run yet
          └─ b ─── e

A proposal is its most probable part. Drafting ahead adds nodes below or beside that part: possible
outcomes of the pass. When one of them comes true, it becomes the root.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush, merge
from itertools import count, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.contract.backend import PREFIX
from specdec.drafters.candidates import Candidates
from specdec.verification.tree import ROOT, DraftTree

_NOTHING: array[Any] = array("i")


class GrownNode:
    """A token that may follow at `position` of the sequence.

    Candidates are stored as plain arrays; nodes are made of them on demand, because a wide tree
    examines few of its candidates.

    Attributes:
        log_prob: log of the probability that it follows its parent.
        path_log_prob: sum of log_prob along the path from the tree's first root.
        node_id: id in the backend, PREFIX once committed; None until the draft has run the node.
        is_run_ahead: whether the draft ran it in parallel to a pass of the target.
        above: its parent, set once it was run; None for a root.
        children: {token: node} of the children made so far.
        hidden_state: output of a draft head that has run it, which its children's runs take.
    """

    __slots__ = (
        "_log_probs",
        "_rest",
        "_tokens",
        "above",
        "children",
        "hidden_state",
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
        self.hidden_state: NDArray[np.float32] | None = None
        self.above: GrownNode | None = None
        self.children: dict[int, GrownNode] = {}
        self._tokens = self._log_probs = _NOTHING
        self._rest: tuple[GrownNode, ...] = ()  # other drafters' children, no candidates of this

    @property
    def is_run(self) -> bool:
        return self.node_id is not None

    def tokens_below_root(self) -> list[int]:
        """Return the tokens on the path to a node that was run."""
        tokens, node = [], self
        while node.above is not None:
            tokens.append(node.token_id)
            node = node.above
        return tokens[::-1]

    def candidate_tree(self, candidates: Candidates) -> None:
        """Set the candidates, likeliest first; only once. Existing children stay as they are."""
        assert not self._tokens, "the candidates of a node are set once"
        new = [(token, log_prob) for token, log_prob in candidates if token not in self.children]
        self._tokens = array("i", [token for token, _ in new])
        self._log_probs = array("d", [log_prob for _, log_prob in new])

    def child(self, token: int, log_prob: float) -> GrownNode:
        """Return the child with this token; `log_prob` is used only if it is no candidate."""
        if token in self.children:
            return self.children[token]
        if token in self._tokens:
            return self._candidate(self._tokens.index(token))
        other = self._made(token, log_prob)
        self._rest += (other,)
        return other

    def likeliest(self, width: int | None = None) -> Iterator[GrownNode]:
        """Yield the children, likeliest first, making each on demand.

        width: maximum children; candidates have precedence over other drafters' children.
        """
        n_candidates = len(self._tokens)
        n_counted = n_candidates if width is None else min(width, n_candidates)
        candidates = map(self._candidate, range(n_counted))
        grafted = self._rest if width is None else self._rest[: width - n_counted]
        if not grafted:
            return candidates
        ranked = sorted(grafted, key=_unlikeliness)
        return merge(candidates, ranked, key=_unlikeliness)

    def _candidate(self, index: int) -> GrownNode:
        token = self._tokens[index]
        known = self.children.get(token)
        return self._made(token, self._log_probs[index]) if known is None else known

    def _made(self, token: int, log_prob: float) -> GrownNode:
        child = GrownNode(token, self.position + 1, log_prob, self.path_log_prob)
        self.children[token] = child
        return child


def _unlikeliness(node: GrownNode) -> float:
    return -node.log_prob


class GrownTree:
    """Nodes below a pending token, whose KV is the last of the draft's committed prefix."""

    def __init__(self, token_id: int, position: int, candidates: Candidates) -> None:
        self.root = GrownNode(token_id, position, 0.0, 0.0)
        self.root.node_id = PREFIX
        self.root.candidate_tree(candidates)

    def run(self, node: GrownNode, node_id: int, candidates: Candidates) -> None:
        """Mark a node as run: set its id in the backend, and its candidates."""
        node.node_id = node_id
        node.candidate_tree(candidates)

    def best_first(
        self, max_depth: int, width: int | None = None
    ) -> Iterator[tuple[GrownNode, GrownNode]]:
        """Yield (parent, node) of all nodes down to a depth, the most probable first.

        Parents come before their children, so the first n nodes are a subtree, and the best of that
        size. width: maximum children considered per node.
        """
        order = count()  # tie-break: the node that was found first
        queue: list[tuple[float, int, GrownNode, GrownNode, Iterator[GrownNode]]] = []
        deepest = self.deepest(max_depth)

        def find_next(parent: GrownNode, siblings: Iterator[GrownNode]) -> None:
            for child in islice(siblings, 1):
                heappush(queue, (-child.path_log_prob, next(order), parent, child, siblings))

        if self.root.position < deepest:
            find_next(self.root, self.root.likeliest(width))
        while queue:
            _, _, parent, node, siblings = heappop(queue)
            yield parent, node
            find_next(parent, siblings)
            if node.position < deepest:
                find_next(node, node.likeliest(width))

    def nodes_of(self, tree: DraftTree, left_out: str) -> set[GrownNode]:
        """Return the nodes made so far that a tree with the same root token has too.

        left_out: name of a source whose nodes do not count where no other one proposes them.
        """
        nodes: dict[int, GrownNode | None] = {ROOT: self.root}
        for index in range(1, len(tree)):
            parent = nodes[tree.parents[index]]
            token = tree.token_ids[index]
            nodes[index] = None if parent is None else parent.children.get(token)
        counted = (index for index in nodes if tree.sources[index] != (left_out,))
        return {node for index in counted if (node := nodes[index]) is not None}

    def deepest(self, max_depth: int) -> int:
        """Return the position of nodes `max_depth` levels below the root."""
        return self.root.position + max_depth

    def log_prob(self, node: GrownNode) -> float:
        """Return the log of the probability that the sequence follows the path to the node."""
        return node.path_log_prob - self.root.path_log_prob

    def follow(self, tokens: Iterable[int]) -> list[GrownNode]:
        """Return the nodes along these tokens below the root, as far as the draft has run them."""
        nodes: list[GrownNode] = []
        node: GrownNode | None = self.root
        for token in tokens:
            node = node.children.get(token) if node is not None else None
            if node is None or not node.is_run:
                break
            nodes.append(node)
        return nodes

    def graft(self, tree: DraftTree) -> None:
        """Add the nodes of a tree with the same root, from any drafter, as children."""
        nodes = [self.root]
        for i in range(1, len(tree)):
            parent, token = nodes[tree.parents[i]], tree.token_ids[i]
            nodes.append(parent.child(token, tree.log_probs[i]))

    def move_to(self, root: GrownNode) -> None:
        """Make a node, which is committed now, the root; drop everything not below it."""
        self.root = root
        root.node_id, root.above = PREFIX, None  # frees the dropped nodes

    def best_tree(self, n: int, max_depth: int, width: int) -> DraftTree:
        """Return the root and its `n` most probable nodes as a proposal."""
        tree = DraftTree(self.root.token_id)
        indices = {id(self.root): ROOT}
        for parent, node in islice(self.best_first(max_depth, width), n):
            indices[id(node)] = tree.add(indices[id(parent)], node.token_id, node.log_prob)
        return tree
