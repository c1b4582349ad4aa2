"""From draft probabilities to those of acceptance, learnt from what the target accepted.

A draft's log q says how sure the draft is, not how often it is right: a greedy target takes its
likeliest token, so a good guess is accepted more often than q says; a draft that was trained on
other sequences is sure and wrong. So (draft / n-gram, q) is mapped to the share of such nodes
that the target chose, given that it had come to their parent.

Every node whose parent was reached is an observation, also one that was cut from the tree before
the pass: the target's token there is known from the emitted text. So even steps that verify
nothing teach whether they should have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.policy.assumptions import ASSUMED_LEVEL_ACCEPTANCE
from specdec.policy.fading import LASTING, MAX_RETAINED, FadingMean, saved_numbers
from specdec.verification.tree import DraftTree

_LARGEST_LOGIT = 7.0
"""Of a probability: q = 0.999, nothing is surer."""
_N_BUCKETS = int(2 * _LARGEST_LOGIT)
"""Of one unit of logit(q) each."""
_MEMORY = 200.0
"""Observations of one bucket after which older ones have lost 63 % of their weight: they give a
share to 3.5 %."""
_PRIOR_TRIES = 2.0
"""Observations of a bucket that the draft's own probability counts as: with eight, a draft that is
sure and never right is believed for too long."""
_PRIOR_CHAIN_TOKENS = 8.0
"""Tokens of chains that the assumed share of accepted ones counts as."""
_MIN_GAIN = 0.01
"""Tokens of a level: what is below is as good as nothing, and has no logarithm worth the name."""


class Calibration:
    """Probability that a node is accepted, given that its parent is.

    A bucket of logit(q) holds (tries, hits, sum of q) of one kind of source, exponentially
    forgotten. Its bias is logit(smoothed hits / tries) - logit(mean q); a node's
    probability is sigmoid(logit(q) + bias), so that the order within a bucket is kept.
    """

    def __init__(self) -> None:
        # Of each combination of sources: a token that two drafters offer is one of its own kind.
        self._buckets: dict[tuple[str, ...], NDArray[np.float64]] = {}  # [bucket, 3]
        self._biases: dict[tuple[str, ...], NDArray[np.float64]] = {}  # [bucket]

    def path_probabilities(self, tree: DraftTree) -> NDArray[np.float64]:
        """Probability of each node to be accepted, float64 [len(tree)]; the root has 1.

        No node has a larger one than its parent.
        """
        result = [1.0] * len(tree)
        for i in range(1, len(tree)):
            own = self._probability(tree.sources[i], tree.log_probs[i])
            result[i] = result[tree.parents[i]] * own
        return np.array(result)

    def observe(self, tree: DraftTree, emitted: Sequence[int]) -> None:
        """The target emitted these tokens, in order, after the tree's root."""
        touched = set()
        for node, token in zip(tree.follow(emitted), emitted, strict=False):
            for candidate, child in tree.children(node).items():
                self._count(tree.sources[child], tree.log_probs[child], candidate == token)
                touched.add(tree.sources[child])
        for source in touched:
            self._biases[source] = _biases(self._buckets[source])

    def cached(self) -> dict[str, list[list[float]]]:
        return {" ".join(source): buckets.tolist() for source, buckets in self._buckets.items()}

    def restore(self, cached: object) -> None:
        """Raises ValueError."""
        if not isinstance(cached, dict) or len(cached) > MAX_RETAINED:
            raise ValueError("no buckets by source")
        for source, value in cached.items():
            buckets = saved_numbers(value, (_N_BUCKETS, 3))
            if (buckets < 0.0).any() or (buckets[:, 1:] > buckets[:, :1] + 1e-6).any():
                raise ValueError("more hits than tries")
            key = tuple(source.split(" "))
            self._buckets[key], self._biases[key] = buckets, _biases(buckets)

    def _probability(self, source: tuple[str, ...], log_q: float) -> float:
        logit = _logit(math.exp(log_q))
        if source in self._biases:
            logit += float(self._biases[source][_bucket(logit)])
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
        x, y = (np.log(np.maximum(values, _MIN_GAIN)) for values in (draft, gains))
        levels.add(float(np.mean(y - x)), n=len(draft))


def worthwhile_level(levels: FadingMean, gain: float) -> float:
    """Draft probability of the level below which the next one gains so many tokens."""
    (log_ratio,) = levels.means
    return math.exp(min(0.0, math.log(max(gain, _MIN_GAIN)) - log_ratio))


def chain_survival() -> FadingMean:
    """Share of the tokens of sampled chains that are accepted, whatever they are.

    For rules that verify tokens drawn from q: their chains must be sized before they are drawn
    (see DraftPolicy), so all that may be used is how far earlier chains came: one share of
    accepted tokens for every depth (Leviathan et al. 2023).
    """
    return FadingMean(1.0 - 1.0 / _MEMORY, (ASSUMED_LEVEL_ACCEPTANCE,), _PRIOR_CHAIN_TOKENS)


def note_chain(survival: FadingMean, n_drafted: int, n_accepted: int) -> None:
    """Of a chain of so many tokens, so many were accepted."""
    for i in range(min(n_drafted, n_accepted + 1)):
        survival.add(float(i < n_accepted))


def _biases(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the bias of the logit for each (tries, hits, sum of q), [bucket]: 0 without tries."""
    tries, hits, sums = counts.T
    means = sums / np.maximum(tries, 1e-9)
    shares = (hits + _PRIOR_TRIES * means) / (tries + _PRIOR_TRIES)
    return np.where(tries > 0.0, _logits(shares) - _logits(means), 0.0)


def _logits(p: NDArray[np.float64]) -> NDArray[np.float64]:
    clipped = np.clip(p, 1e-9, 1.0 - 1e-9)
    result: NDArray[np.float64] = np.log(clipped / (1.0 - clipped))
    return np.clip(result, -_LARGEST_LOGIT, _LARGEST_LOGIT)


def _logit(q: float) -> float:
    if not 0.0 < q < 1.0:
        return math.copysign(_LARGEST_LOGIT, q - 0.5)
    return min(max(math.log(q / (1.0 - q)), -_LARGEST_LOGIT), _LARGEST_LOGIT)


def _bucket(logit: float) -> int:
    return min(max(math.floor(logit + _LARGEST_LOGIT), 0), _N_BUCKETS - 1)
