"""GrownTree: everything that a draft model has run or could run next, below the pending token.

    root ─┬─ a ─┬─ c       a, b: run, so the candidates after them are known, and their KV is live
          │     └─ d       c, d, e: candidates, not run yet
          └─ b ─── e

A proposal is the most probable part of it. What drafting ahead adds lies below or beside that part:
the possible outcomes of the pass. When one of them comes true, the tree goes on from there.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush, merge
from itertools import count, islice
from typing import Any

from backends.contract.backend import PREFIX
from specdec.drafters.candidates import Candidates
from specdec.verification.tree import ROOT, DraftTree

_NOTHING: array[Any] = array("i")


class GrownNode:
    """A token that may come at `position` of the text.

    What a draft says may follow is kept as plain numbers; nodes are made of it as they are asked
    for, because a wide tree looks at few of its candidates.

    Attributes:
        log_prob: log of the probability that it follows its parent.
        path_log_prob: sum of them on the way to the node, counted from where the tree began.
        node_id: the backend's, PREFIX once committed; None until the draft has run the node.
        is_run_ahead: the draft ran it beside a pass of the target.
        above: its parent, known once it was run; None of a root.
        children: {token: node} of those that were asked for.
    """

    __slots__ = (
        "_log_probs",
        "_rest",
        "_tokens",
        "above",
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
        self.above: GrownNode | None = None
        self.children: dict[int, GrownNode] = {}
        self._tokens = self._log_probs = _NOTHING
        self._rest: tuple[GrownNode, ...] = ()  # children that are not among the candidates

    @property
    def is_run(self) -> bool:
        return self.node_id is not None

    def tokens_below_root(self) -> list[int]:
        """Of a node that was run: the tokens on the way to it."""
        tokens, node = [], self
        while node.above is not None:
            tokens.append(node.token_id)
            node = node.above
        return tokens[::-1]

    def candidate_tree(self, candidates: Candidates) -> None:
        """What may follow, likeliest first, said once; children that are there stay as they are."""
        assert not self._tokens, "what may follow a node is said once"
        new = [(token, log_prob) for token, log_prob in candidates if token not in self.children]
        self._tokens = array("i", [token for token, _ in new])
        self._log_probs = array("d", [log_prob for _, log_prob in new])

    def child(self, token: int, log_prob: float) -> GrownNode:
        """The child with this token; of that log probability where no candidate is it."""
        if token in self.children:
            return self.children[token]
        if token in self._tokens:
            return self._candidate(self._tokens.index(token))
        other = self._made(token, log_prob)
        self._rest += (other,)
        return other

    def likeliest(self, width: int | None = None) -> Iterator[GrownNode]:
        """The children, likeliest first, each made when it is asked for.

        width: how many count; candidates go before children that came from elsewhere.
        """
        n_candidates = len(self._tokens)
        n_counted = n_candidates if width is None else min(width, n_candidates)
        candidates = map(self._candidate, range(n_counted))
        rest = self._rest if width is None else self._rest[: width - n_counted]
        if not rest:
            return candidates
        ranked = sorted(rest, key=_unlikeliness)
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
    """The nodes below a pending token whose KV is the end of the draft's committed prefix."""

    def __init__(self, token_id: int, position: int, candidates: Candidates) -> None:
        self.root = GrownNode(token_id, position, 0.0, 0.0)
        self.root.node_id = PREFIX
        self.root.candidate_tree(candidates)

    def run(self, node: GrownNode, node_id: int, candidates: Candidates) -> None:
        """The backend has run the node: its id there, and what may follow it."""
        node.node_id = node_id
        node.candidate_tree(candidates)

    def best_first(
        self, max_depth: int, width: int | None = None
    ) -> Iterator[tuple[GrownNode, GrownNode]]:
        """(parent, node) of all nodes down to a depth, the most probable first.

        A parent comes before its children, so any beginning of this is prefix-closed; and it is the
        best subtree of its size. width: children of a node that count.
        """
        order = count()  # of equals, the one that was found first
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

    def deepest(self, max_depth: int) -> int:
        """Position of the nodes so many levels below the root."""
        return self.root.position + max_depth

    def log_prob(self, node: GrownNode) -> float:
        """Log of the probability that the text goes on along the path to the node."""
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
            nodes.append(parent.child(token, tree.log_probs[i]))

    def move_to(self, root: GrownNode) -> None:
        """The text goes on at `root`, which is committed now; everything beside it is gone."""
        self.root = root
        root.node_id, root.above = PREFIX, None  # which lets go of what is gone

    def best_tree(self, n: int, max_depth: int, width: int) -> DraftTree:
        """The root and its `n` most probable nodes as a proposal."""
        tree = DraftTree(self.root.token_id)
        indices = {id(self.root): ROOT}
        for parent, node in islice(self.best_first(max_depth, width), n):
            indices[id(node)] = tree.add(indices[id(parent)], node.token_id, node.log_prob)
        return tree
