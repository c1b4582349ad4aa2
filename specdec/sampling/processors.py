"""Logits processors in numpy, equal to transformers' classes; and OpenAI's, which it lacks.

A processor is a function (prefix ids int64 [n], scores float32 [vocab]) -> scores float32 [vocab];
prefix ids are the prompt and all tokens emitted or drafted before the position. No processor
changes its arguments. Arithmetic is float32 in torch's order, because a token at the border of
top-p must fall on the same side as in `generate`. Neither torch nor transformers is imported here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from offload.errors import SpecdecError

Scores = NDArray[np.float32]  # [vocab]
Ids = NDArray[np.int64]  # [n]
Processor = Callable[[Ids, Scores], Scores]

NEG_INF = np.float32(-np.inf)


class NumpyProcessor(ABC):
    """A processor that is an object; others of callers are transformers' LogitsProcessors."""

    @abstractmethod
    def __call__(self, prefix: Ids, scores: Scores) -> Scores: ...


class SamplingError(SpecdecError):
    """A row of scores from which no token can be chosen."""


def softmax(scores: Scores) -> Scores:
    """Return the float32 probabilities of a row with at least one finite entry."""
    exps = np.exp(scores - scores.max())
    return np.asarray(exps / exps.sum(), dtype=np.float32)


def log_softmax(scores: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return normalised log-probabilities in the row's dtype; -inf entries stay -inf."""
    shifted = scores - scores.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()), dtype=scores.dtype)


def _cumulative(probs: Scores, start: float = 0.0) -> Scores:
    # torch's CPU cumsum accumulates float32 in double, and rounds every partial sum
    return (np.cumsum(probs, dtype=np.float64) + start).astype(np.float32)


def _without(scores: Scores, removed: NDArray[np.bool_]) -> Scores:
    return np.where(removed, NEG_INF, scores)


def _best(scores: Scores, n: int) -> Ids:
    """Return the indices of the n largest scores, unordered."""
    n_best = min(n, len(scores))
    return np.argpartition(scores, len(scores) - n_best)[len(scores) - n_best :]


def temperature(value: float) -> Processor:
    return lambda prefix, scores: scores / np.float32(value)


def top_k(k: int, min_kept: int = 1) -> Processor:
    """Keep every token that scores at least as high as the k-th (ties stay).

    min_kept, here and below: number of the best tokens that stay in any case.
    """

    def process(prefix: Ids, scores: Scores) -> Scores:
        n_kept = min(max(k, min_kept), len(scores))
        threshold = np.partition(scores, len(scores) - n_kept)[len(scores) - n_kept]
        return _without(scores, scores < threshold)

    return process


def top_p(p: float, min_kept: int = 1) -> Processor:
    """Keep the smallest set of most probable tokens whose mass exceeds p; at least one.

    Of tokens tied at the border the higher ids stay; in torch that depends on the sorting kernel,
    and so on the machine.
    """

    def process(prefix: Ids, scores: Scores) -> Scores:
        probs = softmax(scores)
        head, tail_mass = _split_off_tail(probs, 1 - p)
        order = head[np.argsort(scores[head], kind="stable")]
        removed = _cumulative(probs[order], tail_mass) <= np.float32(1 - p)
        removed[-min_kept:] = False
        new = np.full_like(scores, NEG_INF)
        retained = order[~removed]
        new[retained] = scores[retained]
        return new

    return process


def _split_off_tail(probs: Scores, removable_mass: float) -> tuple[Ids, float]:
    """Return the ids that a top-p filter has to sort, and the mass of all less probable tokens.

    The tail's mass is so small that it is removed in any order: sorting a few hundred tokens
    instead of a whole vocabulary is most of this filter's speed.
    """
    alive = np.flatnonzero(probs > 0.0)
    weights = probs[alive]
    n_head = 256
    while n_head < len(alive):
        threshold = np.partition(weights, len(alive) - n_head)[len(alive) - n_head]
        is_head = weights >= threshold  # all tied tokens on the same side
        tail_mass = float(weights[~is_head].sum(dtype=np.float64))
        if tail_mass < removable_mass * (1 - 1e-6):
            return alive[is_head], tail_mass
        n_head *= 16
    return alive, 0.0


def min_p(p: float, min_kept: int = 1) -> Processor:
    """Keep tokens at least p times as probable as the most probable one."""

    def process(prefix: Ids, scores: Scores) -> Scores:
        probs = softmax(scores)
        removed = probs < np.float32(p) * probs.max()
        removed[_best(probs, min_kept)] = False
        return _without(scores, removed)

    return process


def typical_p(mass: float, min_kept: int = 1) -> Processor:
    """Keep the tokens whose information is closest to the entropy, up to a mass."""

    def process(prefix: Ids, scores: Scores) -> Scores:
        alive = np.flatnonzero(scores != NEG_INF)
        log_probs = log_softmax(scores[alive])
        probs = np.exp(log_probs)
        entropy = -(log_probs * probs).sum()
        distance = np.abs(-log_probs - entropy)
        order = np.argsort(distance, kind="stable")
        cumulative = _cumulative(softmax(scores[alive][order]))
        last = min(int((cumulative < np.float32(mass)).sum()), len(order) - 1)
        removed = np.zeros(len(scores), dtype=np.bool_)
        removed[alive] = distance > distance[order[last]]
        removed[alive[order[:min_kept]]] = False
        return _without(scores, removed)

    return process


def epsilon_cutoff(epsilon: float, min_kept: int = 1) -> Processor:
    """Remove tokens less probable than epsilon, but never the best."""

    def process(prefix: Ids, scores: Scores) -> Scores:
        worst_kept = scores[_best(scores, min_kept)].min()
        return _without(scores, (softmax(scores) < np.float32(epsilon)) & (scores < worst_kept))

    return process


def repetition_penalty(penalty: float) -> Processor:
    """Divide positive and multiply negative logits of tokens that occur in the prefix."""

    def process(prefix: Ids, scores: Scores) -> Scores:
        seen = np.unique(prefix)
        seen = seen[seen < len(scores)]
        old = scores[seen]
        new = scores.copy()
        new[seen] = np.where(old < 0, old * np.float32(penalty), old / np.float32(penalty))
        return new

    return process


def frequency_penalty(penalty: float, prompt_length: int) -> Processor:
    """Subtract penalty · (occurrences after the prompt), as OpenAI does."""

    def process(prefix: Ids, scores: Scores) -> Scores:
        seen, counts = np.unique(prefix[prompt_length:], return_counts=True)
        inside = seen < len(scores)
        new = scores.copy()
        new[seen[inside]] -= np.float32(penalty) * counts[inside].astype(np.float32)
        return new

    return process


def presence_penalty(penalty: float, prompt_length: int) -> Processor:
    """Subtract the penalty from every token that occurs after the prompt, as OpenAI does."""

    def process(prefix: Ids, scores: Scores) -> Scores:
        seen = np.unique(prefix[prompt_length:])
        new = scores.copy()
        new[seen[seen < len(scores)]] -= np.float32(penalty)
        return new

    return process


def logit_bias(biases: Sequence[tuple[int, float]]) -> Processor:
    """Add biases to the logits of single tokens."""
    ids = np.array([token for token, _ in biases], dtype=np.int64)
    values = np.array([value for _, value in biases], dtype=np.float32)

    def process(prefix: Ids, scores: Scores) -> Scores:
        new = scores.copy()
        inside = ids < len(scores)
        np.add.at(new, ids[inside], values[inside])
        return new

    return process


def no_repeat_ngram(size: int) -> Processor:
    """Ban every token that would complete an n-gram already in the prefix."""

    def process(prefix: Ids, scores: Scores) -> Scores:
        if len(prefix) < size:
            return scores
        windows = np.lib.stride_tricks.sliding_window_view(prefix, size)
        suffix = prefix[len(prefix) + 1 - size :]
        banned = windows[(windows[:, :-1] == suffix).all(axis=1), -1]
        return ban(banned[banned < len(scores)])(prefix, scores)

    return process


def ban(token_ids: Sequence[int] | Ids) -> Processor:
    """Rule tokens out; ids beyond the vocabulary are ignored."""
    ids = np.asarray(token_ids, dtype=np.int64)

    def process(prefix: Ids, scores: Scores) -> Scores:
        new = scores.copy()
        new[ids[ids < len(scores)]] = NEG_INF
        return new

    return process


def force(token_ids: Sequence[int]) -> Processor:
    """Rule out all other tokens."""
    ids = np.asarray(token_ids, dtype=np.int64)

    def process(prefix: Ids, scores: Scores) -> Scores:
        new = np.full_like(scores, NEG_INF)
        new[ids[ids < len(scores)]] = 0.0
        return new

    return process


def when_length(condition: Callable[[int], bool], processor: Processor) -> Processor:
    """Apply a processor only at prefix lengths for which the condition holds."""
    return lambda prefix, scores: processor(prefix, scores) if condition(len(prefix)) else scores


def remove_invalid() -> Processor:
    """Replace NaN by 0, and infinities by the largest numbers of float32."""
    top = float(np.finfo(np.float32).max)
    return lambda prefix, scores: np.nan_to_num(scores, nan=0.0, posinf=top, neginf=-top)


def exponential_decay(start_length: int, factor: float, eos_token_ids: Sequence[int]) -> Processor:
    """Raise the end-of-sequence logits by |logit|·(factor^(length − start) − 1) past the start."""
    ids = np.asarray(eos_token_ids, dtype=np.int64)

    def process(prefix: Ids, scores: Scores) -> Scores:
        if len(prefix) <= start_length:
            return scores
        inside = ids[ids < len(scores)]
        old = scores[inside]
        raised = np.abs(old) * np.float32(math.pow(factor, len(prefix) - start_length) - 1)
        new = scores.copy()
        new[inside] = old + np.where(np.isfinite(old), raised, np.float32(0.0))
        return new

    return process


def normalise() -> Processor:
    return lambda prefix, scores: log_softmax(scores).astype(np.float32)
