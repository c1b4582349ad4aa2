"""From draft probabilities to those of acceptance, learnt from what the target accepted.

A draft's log q says how sure the draft is, not how often it is right: a greedy target takes its
likeliest token, so a good guess is accepted more often than q says; a draft that was trained on
other texts is sure and wrong. So (draft / n-gram, q) is mapped to the share of such nodes
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

from specdec.policy.costs import RECENT, kept_numbers, one_measurement
from specdec.verification.tree import DraftTree

_LARGEST_LOGIT = 7.0  # q = 0.999: nothing is surer; buckets are one unit of logit(q) wide
N_BUCKETS = int(2 * _LARGEST_LOGIT)
_MEMORY = 200.0
"""Observations of one bucket after which older ones have lost 63 % of their weight: they give a
share to 3.5 %."""
_STRENGTH = 8.0
"""Observations that "this bucket is like the others of its source" counts as (bench/worlds: half as
many, 0.985 of the speed in memory with a sure draft)."""
_LEAST_SLOPE = 0.5  # of gain over draft probability, in logarithms; anything from 0.1 does
_LEAST_GAIN = 0.01  # tokens: what is below is as good as nothing
_AS_THE_DRAFT_SAYS = 0.1 * np.array([2.0, -2.0, -2.0, 4.0, 4.0])
"""Sums of 1, x, y, x*x, x*y over a tenth of two observations on y = x: (0, 0) and (-2, -2). They
count always: where trees of two levels give points in one place only, their scatter alone would
decide the slope, and could keep trees that small."""
_MOST_SOURCES = 16  # combinations of drafters in a file


class Calibration:
    """Probability that a node is accepted, given that its parent is.

    A bucket of logit(q) holds (tries, hits, sum of q) of one kind of source, exponentially
    forgotten. Its shift is logit(smoothed hits / tries) - logit(mean q); a node's
    probability is sigmoid(logit(q) + shift), so that the order within a bucket is kept. Smoothing
    goes from few observations to many: one shift for all nodes of a source tells a useless draft
    within a few rounds, then each bucket departs from it.
    """

    def __init__(self) -> None:
        # Of each combination of sources: a token that two drafters offer is one of its own kind.
        self._buckets: dict[tuple[str, ...], NDArray[np.float64]] = {}  # [bucket, 3]
        self._shifts: dict[tuple[str, ...], NDArray[np.float64]] = {}  # [bucket]

    def path_probabilities(self, tree: DraftTree) -> NDArray[np.float64]:
        """Probability of each node to be accepted, float64 [len(tree)]; the root has 1.

        No node has a larger one than its parent.
        """
        found = [1.0] * len(tree)
        for i in range(1, len(tree)):
            own = self._probability(tree.sources[i], tree.log_probs[i])
            found[i] = found[tree.parents[i]] * own
        return np.array(found)

    def observe(self, tree: DraftTree, emitted: Sequence[int]) -> None:
        """The target emitted these tokens, in order, after the tree's root."""
        touched = set()
        for node, token in zip(tree.follow(emitted), emitted, strict=False):
            for candidate, child in tree.children(node).items():
                self._count(tree.sources[child], tree.log_probs[child], candidate == token)
                touched.add(tree.sources[child])
        for source in touched:
            self._shifts[source] = _shifts(self._buckets[source])

    def kept(self) -> dict[str, list[list[float]]]:
        return {" ".join(source): buckets.tolist() for source, buckets in self._buckets.items()}

    def restore(self, kept: object) -> None:
        """Raises ValueError."""
        if not isinstance(kept, dict) or len(kept) > _MOST_SOURCES:
            raise ValueError("no buckets by source")
        for source, value in kept.items():
            buckets = kept_numbers(value, (N_BUCKETS, 3))
            if (buckets < 0.0).any() or (buckets[:, 1:] > buckets[:, :1] + 1e-6).any():
                raise ValueError("more hits than tries")
            key = tuple(source.split(" "))
            self._buckets[key], self._shifts[key] = buckets, _shifts(buckets)

    def _probability(self, source: tuple[str, ...], log_q: float) -> float:
        logit = _logit(math.exp(log_q))
        if source in self._shifts:
            logit += float(self._shifts[source][_bucket(logit)])
        return 1.0 / (1.0 + math.exp(-logit))

    def _count(self, source: tuple[str, ...], log_q: float, is_hit: bool) -> None:
        q = math.exp(log_q)
        buckets = self._buckets.setdefault(source, np.zeros((N_BUCKETS, 3)))
        bucket = buckets[_bucket(_logit(q))]
        bucket *= 1.0 - 1.0 / _MEMORY
        bucket += (1.0, float(is_hit), q)


class LevelYield:
    """What one more level of the draft's brings, by the draft probability of the level above it.

    The drafter must decide while it knows nothing but its own probabilities. An overconfident one
    is the more wrong the deeper it goes, so the relation is a power: a line through
    (log draft probability of a level, log of the tokens that the next one gained), fitted to
    recent trees, with a lasting pull towards "as the draft says".
    """

    def __init__(self) -> None:
        self._sums = np.zeros_like(_AS_THE_DRAFT_SAYS)

    def observe(self, draft: NDArray[np.float64], gains: NDArray[np.float64]) -> None:
        """Total draft probability of levels, and tokens gained by the level below each."""
        x, y = (np.log(np.maximum(values, _LEAST_GAIN)) for values in (draft, gains))
        # Trees of one level teach nothing, and what made them so fades.
        new = np.array([len(x), x.sum(), y.sum(), (x * x).sum(), (x * y).sum()])
        self._sums = RECENT * self._sums + new

    def kept(self) -> NDArray[np.float64]:
        return self._sums

    def restore(self, kept: object) -> None:
        """What another process saw counts as one level. Raises ValueError."""
        self._sums = one_measurement(kept_numbers(kept, self._sums.shape))

    def draft_probability(self, gain: float) -> float:
        """Of the level below which the next one gains so many tokens."""
        sums = self._sums + _AS_THE_DRAFT_SAYS
        _, x, y, xx, xy = sums / sums[0]
        slope = max((xy - x * y) / (xx - x * x), _LEAST_SLOPE)
        log_probability = x + (math.log(max(gain, _LEAST_GAIN)) - y) / slope
        return math.exp(min(log_probability, 0.0))


class ChainSurvival:
    """Probability that a sampled chain is accepted up to each depth, whatever its tokens are.

    For rules that verify tokens drawn from q: their chains must be sized before they are drawn
    (see DraftPolicy), so all that may be used is how far earlier chains came: one share of
    accepted tokens for every depth (Leviathan et al. 2023).
    """

    def __init__(self, prior: float) -> None:
        self._sums = _STRENGTH * np.array([1.0, prior])  # tries, hits

    def observe(self, n_drafted: int, n_accepted: int) -> None:
        """Of a chain of so many tokens, so many were accepted."""
        for i in range(min(n_drafted, n_accepted + 1)):
            self._sums = (1.0 - 1.0 / _MEMORY) * self._sums + (1.0, i < n_accepted)

    def kept(self) -> NDArray[np.float64]:
        return self._sums

    def restore(self, kept: object) -> None:
        """Raises ValueError."""
        tries, hits = kept_numbers(kept, (2,))
        if not 0.0 <= hits <= tries or tries == 0.0:
            raise ValueError("more hits than tries")
        self._sums = np.array([tries, hits])

    def probabilities(self, length: int) -> NDArray[np.float64]:
        """Probability that depth 1, 2, ... length is reached; never increasing."""
        return np.cumprod(np.full(length, self._sums[1] / self._sums[0]))


def _shifts(buckets: NDArray[np.float64]) -> NDArray[np.float64]:
    """Shift of the logit for each bucket [bucket]."""
    tries, hits, sums = buckets.T
    logits = _logits(sums / np.maximum(tries, 1e-9))
    common = _common_shift(tries, hits, logits)
    shares = (hits + _STRENGTH * _sigmoids(logits + common)) / (tries + _STRENGTH)
    return np.where(tries > 0, _logits(shares) - logits, common)


def _common_shift(
    tries: NDArray[np.float64], hits: NDArray[np.float64], logits: NDArray[np.float64]
) -> float:
    """The likeliest shift of all buckets alike, with a normal prior around none (Newton)."""
    shift = 0.0
    for _ in range(5):  # it converges in three to four
        p = _sigmoids(logits + shift)
        slope = float((hits - tries * p).sum()) - shift
        curvature = float((tries * p * (1.0 - p)).sum()) + 1.0
        shift += min(max(slope / curvature, -1.0), 1.0)
    return shift


def _sigmoids(x: NDArray[np.float64]) -> NDArray[np.float64]:
    p: NDArray[np.float64] = 1.0 / (1.0 + np.exp(-x))
    return p


def _logits(p: NDArray[np.float64]) -> NDArray[np.float64]:
    clipped = np.clip(p, 1e-9, 1.0 - 1e-9)
    found: NDArray[np.float64] = np.log(clipped / (1.0 - clipped))
    return np.clip(found, -_LARGEST_LOGIT, _LARGEST_LOGIT)


def _logit(q: float) -> float:
    if not 0.0 < q < 1.0:
        return math.copysign(_LARGEST_LOGIT, q - 0.5)
    return min(max(math.log(q / (1.0 - q)), -_LARGEST_LOGIT), _LARGEST_LOGIT)


def _bucket(logit: float) -> int:
    return min(max(math.floor(logit + _LARGEST_LOGIT), 0), N_BUCKETS - 1)
