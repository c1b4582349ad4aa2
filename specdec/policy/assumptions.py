"""Assumed tokens per pass of a tree, before acceptance is measured.

The planner compares memory plans by it; the policy (`specdec.policy.draft_policy`) begins with it
and then measures.
"""

from __future__ import annotations

import heapq
import math
from functools import cache

from specdec.config import SpecConfig

ASSUMED_LEVEL_ACCEPTANCE = 0.85
"""Probability that a level of the tree contains the target's next token."""
_OBSERVED_TOKENS_PER_PASS = ((0, 1.0), (4, 2.35), (8, 2.78), (16, 3.23), (64, 3.64), (128, 3.77))
ASSUMED_TOKENS_PER_PASS = (*_OBSERVED_TOKENS_PER_PASS, (256, 3.85), (512, 3.90), (1024, 3.93))
"""Pairs (draft tokens of the tree, tokens per pass), greedy, of a pair of models whose draft ranks
the target's token first in OBSERVED_AGREEMENT of all positions; interpolated over the logarithm of
the size. Beyond 128 not observed: a doubling gains two thirds of what the one before it did."""
OBSERVED_AGREEMENT = 0.64
ASSUMED_NGRAM_SHARE = 0.25
"""Share of a tree's gain where n-grams alone draft: most sequences repeat themselves seldom."""


def expected_tokens(n_drafted: int, depth: int) -> float:
    """Return the assumed tokens per pass of a tree of this many draft tokens and levels."""
    (low, tokens), *larger = ASSUMED_TOKENS_PER_PASS
    for high, more in larger:
        if n_drafted <= high:
            span = math.log1p(high) - math.log1p(low)
            tokens += (more - tokens) * (math.log1p(n_drafted) - math.log1p(low)) / span
            break
        low, tokens = high, more
    return min(tokens, tokens_of_levels(depth))


def tokens_of_levels(depth: int) -> float:
    """Return the tokens per pass of a tree of `depth` levels, with any number of nodes.

    A level is reached if all before it contain the target's token: a geometric sum.
    """
    return sum(ASSUMED_LEVEL_ACCEPTANCE**level for level in range(depth + 1))


@cache
def likely_levels(n_drafted: int, width: int) -> int:
    """Return the levels of the likeliest tree of `n_drafted` nodes; the draft runs once for each.

    A node's first candidate is right with ASSUMED_LEVEL_ACCEPTANCE, each further one with that
    share of the remaining probability.
    """
    right, wrong = math.log(ASSUMED_LEVEL_ACCEPTANCE), math.log1p(-ASSUMED_LEVEL_ACCEPTANCE)
    deepest = 0
    open_nodes = [(-right, 1, 0)]  # (-log probability, level, number of likelier siblings)
    for _ in range(n_drafted):
        cost, level, rank = heapq.heappop(open_nodes)
        deepest = max(deepest, level)
        heapq.heappush(open_nodes, (cost - right, level + 1, 0))
        if rank + 1 < width:
            heapq.heappush(open_nodes, (cost - wrong, level, rank + 1))
    return deepest


def best_depth(spec: SpecConfig, deepest: int, pass_seconds: float, level_seconds: float) -> int:
    """Return the number of levels, up to `deepest`, with the most tokens per second.

    A level that is reached with probability a^d costs one run of the draft (Leviathan et al.
    2023, theorem 3.8, with a tree's acceptance for a). Return `deepest` where levels cost nothing
    or the user fixed them, and at least the levels that a fixed number of tokens needs.
    """
    if spec.draft_depth is not None or not level_seconds:
        return deepest
    return max(
        range(min(_min_depth(spec), deepest), deepest + 1),
        key=lambda depth: tokens_of_levels(depth) / (pass_seconds + depth * level_seconds),
        default=0,
    )


def _min_depth(spec: SpecConfig) -> int:
    """Return the minimum levels of a tree with the number of tokens that the user fixed."""
    n_left, n_of_level, depth = spec.num_draft_tokens or 0, 1, 0
    while n_left > 0:
        n_of_level *= spec.width
        n_left -= n_of_level
        depth += 1
    return max(1, depth)
