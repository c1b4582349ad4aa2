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

from specdec.policy.assumptions import ASSUMED_LEVEL_ACCEPTANCE
from specdec.policy.fading import LASTING, MOST_KEPT, FadingMean, kept_numbers
from specdec.verification.tree import DraftTree

_LARGEST_LOGIT = 7.0
"""Of a probability: q = 0.999, nothing is surer."""
_N_BUCKETS = int(2 * _LARGEST_LOGIT)
"""Of one unit of logit(q) each."""
_MEMORY = 200.0
"""Observations of one bucket after which older ones have lost 63 % of their weight: they give a
share to 3.5 %."""
_STRENGTH = 8.0
"""Observations that "this bucket is like the others of its source" counts as (bench/worlds: half as
many, 0.985 of the speed in memory with a sure draft)."""
_LEAST_GAIN = 0.01
"""Tokens of a level: what is below is as good as nothing, and has no logarithm worth the name."""


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
        if not isinstance(kept, dict) or len(kept) > MOST_KEPT:
            raise ValueError("no buckets by source")
        for source, value in kept.items():
            buckets = kept_numbers(value, (_N_BUCKETS, 3))
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
        buckets = self._buckets.setdefault(source, np.zeros((_N_BUCKETS, 3)))
        bucket = buckets[_bucket(_logit(q))]
        bucket *= 1.0 - 1.0 / _MEMORY
        bucket += (1.0, float(is_hit), q)


def level_yield() -> FadingMean:
    """Logarithm of what one more level of the draft's gains, in tokens, over the draft probability
    of the level above it.

    The drafter must decide while it knows nothing but its own probabilities.
    """
    return FadingMean(LASTING, (0.0,))


def note_levels(levels: FadingMean, draft: NDArray[np.float64], gains: NDArray[np.float64]) -> None:
    """Total draft probability of levels, and tokens gained by the level below each."""
    if len(draft):
        x, y = (np.log(np.maximum(values, _LEAST_GAIN)) for values in (draft, gains))
        levels.add(float(np.mean(y - x)), n=len(draft))


def worthwhile_level(levels: FadingMean, gain: float) -> float:
    """Draft probability of the level below which the next one gains so many tokens."""
    (log_ratio,) = levels.means
    return math.exp(min(0.0, math.log(max(gain, _LEAST_GAIN)) - log_ratio))


def chain_survival() -> FadingMean:
    """Share of the tokens of sampled chains that are accepted, whatever they are.

    For rules that verify tokens drawn from q: their chains must be sized before they are drawn
    (see DraftPolicy), so all that may be used is how far earlier chains came: one share of
    accepted tokens for every depth (Leviathan et al. 2023).
    """
    return FadingMean(1.0 - 1.0 / _MEMORY, (ASSUMED_LEVEL_ACCEPTANCE,), _STRENGTH)


def note_chain(survival: FadingMean, n_drafted: int, n_accepted: int) -> None:
    """Of a chain of so many tokens, so many were accepted."""
    for i in range(min(n_drafted, n_accepted + 1)):
        survival.add(float(i < n_accepted))


def _shifts(buckets: NDArray[np.float64]) -> NDArray[np.float64]:
    """Shift of the logit for each bucket [bucket]: that of all of them, where it has few tries."""
    of_all = _smoothed_shift(buckets.sum(axis=0), np.zeros(()))
    return _smoothed_shift(buckets, of_all)


def _smoothed_shift(
    counts: NDArray[np.float64], expected: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Of (tries, hits, sum of q) [..., 3]: as expected, until tries say otherwise."""
    tries, hits, sums = np.moveaxis(counts, -1, 0)
    logits = _logits(sums / np.maximum(tries, 1e-9))
    shares = (hits + _STRENGTH * _sigmoids(logits + expected)) / (tries + _STRENGTH)
    return np.where(tries > 0.0, _logits(shares) - logits, expected)


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
    return min(max(math.floor(logit + _LARGEST_LOGIT), 0), _N_BUCKETS - 1)
