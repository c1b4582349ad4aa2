"""Calibration: map draft probabilities to acceptance probabilities, learnt from accepted tokens.

A draft's log q is its confidence, not its accuracy: a greedy target takes its likeliest token, so a
good guess is accepted more often than q; a draft that was trained on other data is sure and wrong.
So (draft / n-gram, q) is mapped to the share of such nodes that the target chose, given that their
parent was accepted.

Every node whose parent was accepted is an observation, also one that was trimmed before the pass:
the target's token there is known from the emitted tokens. So steps without verification also show
whether verifying would have paid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.policy.assumptions import ASSUMED_LEVEL_ACCEPTANCE
from specdec.policy.moving_average import LASTING, MAX_SAVED_ENTRIES, MovingAverage, saved_numbers
from specdec.verification.tree import DraftTree

_LARGEST_LOGIT = 7.0
"""Bound on the logit of a probability: q = 0.999."""
_N_BUCKETS = int(2 * _LARGEST_LOGIT)
"""Number of buckets, each one unit of logit(q) wide."""
_MEMORY = 200.0
"""Observations of one bucket after which older ones have lost 63 % of their weight: the rate's
standard error is then 3.5 %."""
_PRIOR_TRIES = 2.0
"""Weight of the draft's own probability, in observations: with eight, a draft that is sure and
never right is trusted for too long."""
_PRIOR_CHAIN_TOKENS = 8.0
"""Weight of the assumed acceptance rate of chains, in tokens."""
_MIN_GAIN = 0.01
"""Lower bound on a level's gain in tokens, so that its logarithm is finite, and on the probability
of the level above."""


class Calibration:
    """Probability that a node is accepted, given that its parent is.

    A bucket of logit(q) holds (tries, hits, sum of q) of one kind of source, exponentially
    forgotten. Its bias is logit(smoothed hits / tries) - logit(mean q); a node's
    probability is sigmoid(logit(q) + bias), so that the order within a bucket is kept.
    """

    def __init__(self) -> None:
        # Key: combination of sources; tokens that two drafters propose have their own buckets.
        self._buckets: dict[tuple[str, ...], NDArray[np.float64]] = {}  # [bucket, 3]
        self._biases: dict[tuple[str, ...], NDArray[np.float64]] = {}  # [bucket]

    def path_probabilities(self, tree: DraftTree) -> NDArray[np.float64]:
        """Return each node's probability to be accepted, float64 [len(tree)]; the root has 1.

        No node has a larger one than its parent.
        """
        probs = [1.0] * len(tree)
        for i in range(1, len(tree)):
            own = self._probability(tree.sources[i], tree.log_probs[i])
            probs[i] = probs[tree.parents[i]] * own
        return np.array(probs)

    def observe(self, tree: DraftTree, emitted: Sequence[int]) -> None:
        """Count hits and misses along the tokens that the target emitted after the tree's root."""
        touched = set()
        for node, token in zip(tree.follow(emitted), emitted, strict=False):
            for candidate, child in tree.children(node).items():
                self._count(tree.sources[child], tree.log_probs[child], candidate == token)
                touched.add(tree.sources[child])
        for source in touched:
            self._biases[source] = _biases(self._buckets[source])

    def state_dict(self) -> dict[str, list[list[float]]]:
        return {" ".join(source): buckets.tolist() for source, buckets in self._buckets.items()}

    def load_state_dict(self, state_dict: object) -> None:
        """Restore the output of `state_dict`. Raises ValueError."""
        if not isinstance(state_dict, dict) or len(state_dict) > MAX_SAVED_ENTRIES:
            raise ValueError("no buckets by source")
        for source, value in state_dict.items():
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


def depth_gain() -> MovingAverage:
    """Return the running mean of log(gain / q), which calibrates the drafter's q.

    gain: tokens that a level adds, minus their price.
    q: total draft probability of the level above.
    """
    return MovingAverage(LASTING, (0.0,))


def note_levels(
    levels: MovingAverage,
    draft: NDArray[np.float64],
    gains: NDArray[np.float64],
    weight: float = 1.0,
) -> None:
    """Record the total draft probability of levels, and the gain in tokens of the level below.
    Levels of less than MIN_GAIN are left out."""
    is_evidence = draft >= _MIN_GAIN
    if is_evidence.any():
        x, y = np.log(draft[is_evidence]), np.log(np.maximum(gains[is_evidence], _MIN_GAIN))
        levels.add(float(np.mean(y - x)), n=weight * len(x))


def min_level_probability(levels: MovingAverage, gain: float) -> float:
    """Return the minimum total draft probability of a level whose next one gains `gain` tokens."""
    (log_ratio,) = levels.means
    return math.exp(min(0.0, math.log(max(gain, _MIN_GAIN)) - log_ratio))


def chain_acceptance_rate() -> MovingAverage:
    """Return the mean acceptance rate of sampled chains, whatever their tokens are.

    For rules that verify tokens drawn from q: their chains must be sized before they are drawn
    (see DraftPolicy), so only the acceptance of earlier chains may be used: one rate for every
    depth (Leviathan et al. 2023).
    """
    return MovingAverage(1.0 - 1.0 / _MEMORY, (ASSUMED_LEVEL_ACCEPTANCE,), _PRIOR_CHAIN_TOKENS)


def note_chain(survival: MovingAverage, n_drafted: int, n_accepted: int) -> None:
    """Record that `n_accepted` tokens of a chain of `n_drafted` were accepted."""
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
