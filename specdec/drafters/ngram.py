"""NgramDrafter: the continuation of an earlier occurrence of the last few tokens (prompt lookup).

It costs no model and no memory traffic, and it is strong where text repeats itself: editing code,
quoting the prompt, lists. Several earlier occurrences make a tree: their common prefixes are
shared, their differences are branches.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

from specdec.drafters.base import Drafter, TreeLimits
from specdec.sampling.context_window import ContextWindow
from specdec.verification.acceptance import Acceptance
from specdec.verification.tree import ROOT, DraftTree

SOURCE = "ngram"
MAX_NGRAM = 4
MAX_OCCURRENCES = 16  # per n-gram, most recent first: older ones seldom change the tree
MAX_MATCH_BUCKET = 8  # a match this long or longer is one bucket of the calibration
RECENCY_DECAY = 0.8  # weight of an occurrence relative to the next more recent one
_TOKEN_BITS = 32  # an n-gram is one integer key: smaller and faster than a tuple
_CHECKED_TAIL = 64  # tokens compared to see that a context extends the indexed one
# Beta prior of "the target's token is among the continuations", by match length 1, 2, ...:
# short matches are mostly coincidence. Eight pseudo-observations: a sequence soon overrules them.
_PRIOR_MEANS = (0.25, 0.45, 0.6, 0.7, 0.78, 0.84, 0.88, 0.9)
_PRIOR_STRENGTH = 8.0
_MEMORY = 64.0  # tries after which older ones count half, because sequences change
_MIN_DOUBT = 1e-6


class NgramIndex:
    """Index of the positions that follow each n-gram (1..max_ngram).

    Extending by a token costs O(max_ngram). Occurrences of one n-gram are chained from the most
    recent backwards, so that an entry is one dictionary slot and one array element.
    """

    def __init__(self, max_ngram: int) -> None:
        self.max_ngram = max_ngram
        self.tokens: list[int] = []
        # n -> {n-gram key: latest position of the token that followed it}
        self._latest: list[dict[int, int]] = [{} for _ in range(max_ngram + 1)]
        # n -> position -> the position before it for the same n-gram, or -1
        self._previous: list[array[int]] = [array("l") for _ in range(max_ngram + 1)]

    def is_extended_by(self, context_ids: Sequence[int]) -> bool:
        """Return whether the context begins with the indexed tokens (checked at their two ends).

        A false positive costs acceptance only, never correctness.
        """
        n = len(self.tokens)
        if n > len(context_ids):
            return False
        tail = max(0, n - _CHECKED_TAIL)
        head = min(n, _CHECKED_TAIL)
        return (
            list(context_ids[tail:n]) == self.tokens[tail:]
            and list(context_ids[:head]) == self.tokens[:head]
        )

    def extend(self, context_ids: Sequence[int]) -> None:
        """Index the tokens that the context has beyond the indexed ones."""
        for position in range(len(self.tokens), len(context_ids)):
            key = 0
            for n in range(1, self.max_ngram + 1):
                self._previous[n].append(-1)
                if n <= position:
                    key |= self.tokens[position - n] << (_TOKEN_BITS * (n - 1))
                    latest = self._latest[n]
                    self._previous[n][position] = latest.get(key, -1)
                    latest[key] = position
            self.tokens.append(int(context_ids[position]))

    def occurrences(self, n: int) -> list[int]:
        """Return positions that followed earlier occurrences of the last n tokens, latest first."""
        if n > len(self.tokens):
            return []
        key = 0
        for i in range(1, n + 1):
            key |= self.tokens[-i] << (_TOKEN_BITS * (i - 1))
        result: list[int] = []
        position = self._latest[n].get(key, -1)
        while position >= 0 and len(result) < MAX_OCCURRENCES:
            result.append(position)
            position = self._previous[n][position]
        return result


@dataclass
class _Branch:
    """A node of the trie of continuations, from which the draft tree is chosen."""

    weight: float = 0.0
    children: dict[int, _Branch] = field(default_factory=dict)


class MatchRates:
    """Hit rates of matches by length; may be shared by the drafters of many sequences."""

    def __init__(self) -> None:
        self._n_tries = [_PRIOR_STRENGTH] * MAX_MATCH_BUCKET
        self._n_hits = [_PRIOR_STRENGTH * mean for mean in _PRIOR_MEANS]

    def confidence(self, match_length: int) -> float:
        """Return the estimated probability that such a match has the target's next token."""
        bucket = _bucket(match_length)
        share = self._n_hits[bucket] / self._n_tries[bucket]
        # Thousands of hits in a row round to 1, whose log(1 - p) is infinite.
        return min(max(share, _MIN_DOUBT), 1.0 - _MIN_DOUBT)

    def count(self, match_length: int, is_hit: bool) -> None:
        bucket = _bucket(match_length)
        if self._n_tries[bucket] >= _MEMORY:
            self._n_tries[bucket] /= 2.0
            self._n_hits[bucket] /= 2.0
        self._n_tries[bucket] += 1.0
        self._n_hits[bucket] += float(is_hit)


class NgramDrafter(Drafter):
    """Drafter of the continuations of the longest n-grams that end the context.

    A candidate's probability is (hit rate of matches of this length, learned online) × (its share
    among the continuations, recent ones weighing more). The probability that the longest match
    leaves open goes to the next shorter one.

    rates: hit rates shared with other sequences; private ones when None.
    window: part of a context that is searched.
    """

    def __init__(
        self,
        max_ngram: int = MAX_NGRAM,
        rates: MatchRates | None = None,
        window: ContextWindow = ContextWindow(),  # noqa: B008 (immutable)
    ) -> None:
        if max_ngram < 1:
            raise ValueError(f"max_ngram is {max_ngram}, must be at least 1")
        self.max_ngram, self._window = max_ngram, window
        self._index = NgramIndex(max_ngram)
        self._proposed: DraftTree | None = None
        # proposed node -> [(match length, tokens it proposed there)], longest match first
        self._matches: dict[int, list[tuple[int, frozenset[int]]]] = {}
        self._rates = rates or MatchRates()

    def confidence(self, match_length: int) -> float:
        return self._rates.confidence(match_length)

    def propose(self, context_ids: Sequence[int], limits: TreeLimits) -> DraftTree:
        if self._window.n_recent is not None:
            context_ids = self._window.view(context_ids)
        if not self._index.is_extended_by(context_ids):
            self._index = NgramIndex(self.max_ngram)
        self._index.extend(context_ids)
        tree = DraftTree(context_ids[-1])
        self._proposed, self._matches = tree, {}
        if limits.max_nodes < 1 or limits.max_depth < 1:
            return tree
        seen: set[int] = set()
        log_open: dict[int, float] = {}  # node -> log probability that no longer match was right
        for n in range(self.max_ngram, 0, -1):
            positions = [p for p in self._index.occurrences(n) if p not in seen]
            if positions:
                seen.update(positions)
                self._grow(tree, self._trie(positions, limits.max_depth), n, log_open, limits)
            if limits.width == 1 and tree.n_drafted:
                break  # a chain follows the longest match only
        best = tree.best_indices(limits.max_nodes)
        if len(best) < len(tree):
            return tree.subset(best)  # observe() uses the uncut tree, which has more evidence
        return tree

    def _trie(self, positions: list[int], max_depth: int) -> _Branch:
        """Return the continuations from these positions, weighted by recency, merged by prefix.

        A continuation that reaches the end of the context repeats itself from its position, so that
        a sequence of period n is continued with period n.
        """
        root = _Branch()
        tokens = self._index.tokens
        weight = 1.0
        for position in positions:
            branch = root
            for token in islice(cycle(tokens[position : position + max_depth]), max_depth):
                branch = branch.children.setdefault(token, _Branch())
                branch.weight += weight
            weight *= RECENCY_DECAY
        return root

    def _grow(
        self,
        tree: DraftTree,
        trie: _Branch,
        n: int,
        log_open: dict[int, float],
        limits: TreeLimits,
    ) -> None:
        """Add the most probable continuations of matches of n tokens to the tree, best first."""
        order = 0  # breaks ties in favour of more recent continuations
        queue = [(0.0, order, ROOT, 0, trie)]
        n_added = 0
        while queue and n_added < limits.max_nodes:
            _, _, node, depth, branch = heapq.heappop(queue)
            confidence = self.confidence(n + depth)
            log_confidence = math.log(confidence) + log_open.get(node, 0.0)
            log_open[node] = log_open.get(node, 0.0) + math.log1p(-confidence)
            total = sum(child.weight for child in branch.children.values())
            ranked = sorted(branch.children.items(), key=lambda item: -item[1].weight)
            fitting = _fitting(tree.children(node), ranked, limits.width)
            self._matches.setdefault(node, []).append((n + depth, frozenset(t for t, _ in fitting)))
            for token, child_branch in fitting:
                log_prob = log_confidence + math.log(child_branch.weight / total)
                child = tree.add(node, token, log_prob, SOURCE)
                n_added += 1
                if depth + 1 < limits.max_depth and child_branch.children:
                    order += 1
                    entry = (-tree.path_log_probs[child], order, child, depth + 1, child_branch)
                    heapq.heappush(queue, entry)

    def observe(self, acceptance: Acceptance, tree: DraftTree) -> None:
        """Count hits of each match length along the emitted tokens.

        A shorter match is counted only where the longer ones missed, as its probability assumes.
        """
        if self._proposed is None:
            return
        emitted = acceptance.emitted(tree)
        path = self._proposed.follow(emitted)
        for node, token in zip(path, emitted, strict=False):
            for match_length, tokens in self._matches.get(node, ()):
                self._rates.count(match_length, token in tokens)
                if token in tokens:
                    break
        self._proposed, self._matches = None, {}

    def reset(self) -> None:
        """Forget the context; the hit rates stay."""
        self._index = NgramIndex(self.max_ngram)
        self._proposed, self._matches = None, {}


def _fitting(
    present: dict[int, int], ranked: list[tuple[int, _Branch]], width: int
) -> list[tuple[int, _Branch]]:
    """Return the best candidates that leave a node with at most `width` children."""
    n_free = width - len(present)
    fitting = []
    for token, branch in ranked[:width]:
        if token not in present:
            n_free -= 1
            if n_free < 0:
                continue
        fitting.append((token, branch))
    return fitting


def _bucket(match_length: int) -> int:
    return min(match_length, MAX_MATCH_BUCKET) - 1
