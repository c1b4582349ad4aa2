"""From draft probabilities to those of acceptance, learnt from what the target accepted.

A draft's log q says how sure the draft is, not how often it is right: a greedy target takes its
likeliest token, so a good guess is accepted more often than q says; a draft that was trained on
other texts is sure and wrong. So (draft / n-gram, depth, q) is mapped to the share of such nodes
that the target chose, given that it had come to their parent.

Every node whose parent was reached is an observation, also one that was cut from the tree before
the pass: the target's token there is known from the emitted text. So even rounds that verify
nothing teach whether they should have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.verification.tree import DraftTree

N_BUCKETS = 14
_LOWEST_LOGIT = -7.0  # buckets are one unit of logit(q) wide: from q = 0.001 to 0.999
_N_DEPTHS = 4  # depth 1, 2-3, 4-7, 8 and more
_MEMORY = 200.0  # observations of one cell after which older ones have lost 63 % of their weight
_SOURCE_STRENGTH = 1.0  # of the belief that q is right: precision of the shift of a whole source
_LARGEST_STEP = 1.0  # of Newton's method, in logits
_N_STEPS = 5
_POOLED_STRENGTH = 4.0  # pseudo-observations of "this bucket is like the others"
_DEPTH_STRENGTH = 12.0  # of "this depth is like the others"
_LARGEST_LOGIT = 8.0  # nothing is surer than 0.9997


class Calibration:
    """Probability that a node is accepted, given that its parent is.

    A cell holds (tries, hits, sum of q) of one kind of source, depth and bucket of logit(q), all
    exponentially forgotten. Its shift is logit(smoothed hits / tries) - logit(mean q); a node's
    probability is sigmoid(logit(q) + shift), so that the order within a bucket is kept. Smoothing
    goes from few observations to many: one shift for all nodes of a source tells a useless draft
    within a few rounds, then each bucket departs from it, then each depth from its bucket.
    """

    def __init__(self) -> None:
        # Of each combination of sources: a token that two drafters offer is one of its own kind.
        self._cells: dict[tuple[str, ...], NDArray[np.float64]] = {}  # [depth, bucket, 3]
        self._shifts: dict[tuple[str, ...], NDArray[np.float64]] = {}  # [depth, bucket]

    def path_probabilities(self, tree: DraftTree) -> NDArray[np.float64]:
        """Probability of each node to be accepted, float64 [len(tree)]; the root has 1.

        No node has a larger one than its parent.
        """
        found = [1.0] * len(tree)
        for i in range(1, len(tree)):
            parent = tree.parents[i]
            own = self._probability(tree.sources[i], tree.depths[i], tree.log_probs[i])
            found[i] = found[parent] * own
        return np.array(found)

    def observe(self, tree: DraftTree, emitted: Sequence[int]) -> None:
        """The target emitted these tokens, in order, after the tree's root."""
        touched = set()
        for node, token in zip(tree.follow(emitted), emitted, strict=False):
            for candidate, child in tree.children(node).items():
                place = (tree.depths[child], tree.log_probs[child])
                self._count(tree.sources[child], *place, candidate == token)
                touched.add(tree.sources[child])
        for source in touched:
            self._shifts[source] = _shifts(self._cells[source])

    def _probability(self, source: tuple[str, ...], depth: int, log_q: float) -> float:
        logit = _logit(math.exp(log_q))
        shifts = self._shifts.get(source)
        if shifts is not None:
            logit += float(shifts[_depth_class(depth), _bucket(logit)])
        return 1.0 / (1.0 + math.exp(-logit))

    def _count(self, source: tuple[str, ...], depth: int, log_q: float, is_hit: bool) -> None:
        if source not in self._cells:
            self._cells[source] = np.zeros((_N_DEPTHS, N_BUCKETS, 3))
        q = math.exp(log_q)
        cell = self._cells[source][_depth_class(depth), _bucket(_logit(q))]
        cell *= 1.0 - 1.0 / _MEMORY
        cell += (1.0, float(is_hit), q)


class ChainSurvival:
    """Probability that a sampled chain is accepted up to each depth, whatever its tokens are.

    For rules that verify tokens drawn from q: their chains must be sized before they are drawn
    (see DraftPolicy), so all that may be used is how far earlier chains came.
    """

    def __init__(self, prior: float, max_depth: int) -> None:
        self._prior = prior
        self._counts = np.zeros((max_depth, 2))  # (tries, hits) by depth

    def observe(self, n_drafted: int, n_accepted: int) -> None:
        """Of a chain of so many tokens, so many were accepted."""
        n_tried = min(n_drafted, n_accepted + 1, len(self._counts))
        self._counts[:n_tried] *= 1.0 - 1.0 / _MEMORY
        self._counts[:n_tried, 0] += 1.0
        self._counts[: min(n_accepted, n_tried), 1] += 1.0

    def probabilities(self) -> NDArray[np.float64]:
        """Probability that depth 1, 2, ... is reached, float64 [max_depth]; never increasing."""
        tries, hits = self._counts.T
        pooled = (hits.sum() + _POOLED_STRENGTH * self._prior) / (tries.sum() + _POOLED_STRENGTH)
        shares = (hits + _DEPTH_STRENGTH * pooled) / (tries + _DEPTH_STRENGTH)
        return np.cumprod(shares)


def _shifts(cells: NDArray[np.float64]) -> NDArray[np.float64]:
    """Shift of the logit for each cell [depth, bucket]."""
    tries, hits, sums = np.moveaxis(cells, 2, 0)
    all_tries, all_hits, all_sums = tries.sum(0), hits.sum(0), sums.sum(0)
    mean = all_sums / np.maximum(all_tries, 1e-9)
    whole = _source_shift(all_tries, all_hits, _logits(mean))
    pooled = _smoothed_shift(all_tries, all_hits, mean, whole, _POOLED_STRENGTH)
    own_mean = np.where(tries > 0, sums / np.maximum(tries, 1e-9), mean)
    return _smoothed_shift(tries, hits, own_mean, pooled, _DEPTH_STRENGTH)


def _source_shift(
    tries: NDArray[np.float64], hits: NDArray[np.float64], logits: NDArray[np.float64]
) -> float:
    """The likeliest shift of all buckets alike, with a normal prior around none (Newton)."""
    shift = 0.0
    for _ in range(_N_STEPS):
        p = _sigmoids(logits + shift)
        slope = float((hits - tries * p).sum()) - _SOURCE_STRENGTH * shift
        curvature = float((tries * p * (1.0 - p)).sum()) + _SOURCE_STRENGTH
        shift += min(max(slope / curvature, -_LARGEST_STEP), _LARGEST_STEP)
    return shift


def _smoothed_shift(
    tries: NDArray[np.float64],
    hits: NDArray[np.float64],
    mean_q: NDArray[np.float64],
    prior_shift: NDArray[np.float64] | float,
    strength: float,
) -> NDArray[np.float64]:
    """Shift that takes the mean q to the share of hits, smoothed towards the prior shift."""
    logits = _logits(mean_q)
    share = (hits + strength * _sigmoids(logits + prior_shift)) / (tries + strength)
    return np.where(tries > 0, _logits(share) - logits, prior_shift)


def _sigmoids(x: NDArray[np.float64]) -> NDArray[np.float64]:
    p: NDArray[np.float64] = 1.0 / (1.0 + np.exp(-x))
    return p


def _logits(p: NDArray[np.float64]) -> NDArray[np.float64]:
    clipped = np.clip(p, 1e-9, 1.0 - 1e-9)
    limited: NDArray[np.float64] = np.clip(
        np.log(clipped / (1.0 - clipped)), -_LARGEST_LOGIT, _LARGEST_LOGIT
    )
    return limited


def _logit(q: float) -> float:
    if q <= 0.0:
        return -_LARGEST_LOGIT
    if q >= 1.0:
        return _LARGEST_LOGIT
    return min(max(math.log(q / (1.0 - q)), -_LARGEST_LOGIT), _LARGEST_LOGIT)


def _bucket(logit: float) -> int:
    return min(max(int(math.floor(logit - _LOWEST_LOGIT)), 0), N_BUCKETS - 1)


def _depth_class(depth: int) -> int:
    return min(depth.bit_length(), _N_DEPTHS) - 1
