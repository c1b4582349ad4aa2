"""Beam search and beam-search sampling equal to transformers' `generate`, without a model.

The state follows `GenerationMixin._beam_search` of transformers 5.17 to 5.23 for a batch of one,
also in float32, so that equal log-probabilities give equal sequences:

    running    num_beams unfinished sequences, each with the sum of its processed log-probabilities
    finished   the best num_beams sequences that ended, by sum / length^length_penalty

A step takes the best K = max(2, 1 + n_eos) * num_beams continuations of all running beams together
(greedy), or draws K of them without replacement (sampling). Those that end may enter `finished` if
they are among the first num_beams; the best num_beams of the others run on.

Ties go to the lower (beam, token); torch's topk leaves that open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float32]
Rank = Callable[[Scores, NDArray[np.int64]], NDArray[Any]]
"""Function (scores [n], indices of the continuations [n]) -> keys [n]; the largest are taken.

Continuation i is token i % vocab after beam i // vocab.
"""

LOWEST = np.float32(-1.0e9)
"""Score that transformers adds to a beam that must not be chosen."""

T = TypeVar("T")


@dataclass(frozen=True)
class BeamRules:
    """Rules by which beams are kept and ranked.

    Attributes:
        num_beams: number of running sequences.
        length_penalty: a finished sequence's score is divided by length^length_penalty.
        early_stopping: True ends the search with num_beams finished sequences; False when the best
            running beam cannot beat them at its present length; "never" when it cannot at any.
        n_eos: number of tokens that end a sequence.
        max_new_tokens: maximum tokens of a sequence.
    """

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    n_eos: int = 1
    max_new_tokens: int = 64

    @property
    def num_retained(self) -> int:
        """Continuations taken in a step: enough that num_beams of them do not end with an EOS."""
        return max(2, 1 + self.n_eos) * self.num_beams


class BeamSearch(Generic[T]):
    """One search over sequences of the caller's own type T.

    Args:
        rules: how beams are kept and ranked.
        root: the empty sequence.
        grow: (running sequence, token) -> the sequence with that token appended.
        has_ended: returns whether a sequence has ended (end of sequence, stop string, length).
        rank: `by_score`, or scores with Gumbel noise to draw without replacement.
    """

    def __init__(
        self,
        rules: BeamRules,
        root: T,
        grow: Callable[[T, int], T],
        has_ended: Callable[[T], bool],
        rank: Rank,
    ) -> None:
        self._rules, self._grow, self._has_ended, self._rank = rules, grow, has_ended, rank
        n_beams = rules.num_beams
        self.running: list[T] = [root] * n_beams
        # Only one beam is alive at first, so that the first tokens all continue the root.
        self._scores = np.full(n_beams, LOWEST, dtype=np.float32)
        self._scores[0] = 0.0
        self._finished: list[T | None] = [None] * n_beams
        self._finished_scores = np.full(n_beams, LOWEST, dtype=np.float32)
        self._n_tokens = 0
        self._can_improve = True
        self.is_over = False

    def advance(self, log_probs: Iterable[Scores]) -> None:
        """Extend all running beams by one token.

        log_probs: num_beams rows [vocab] of processed log-probabilities, one for each of `running`;
            a generator, so that one row is in memory at a time.
        """
        scores, which, vocab = np.empty(0, np.float32), np.empty(0, np.int64), 0
        keys: NDArray[Any] = np.empty(0, np.float32)
        for beam, row in enumerate(log_probs):
            vocab = len(row)
            summed, numbers = row + self._scores[beam], np.arange(vocab) + beam * vocab
            keys = np.concatenate([keys, self._rank(summed, numbers)])
            taken = best_continuations(keys, min(self._rules.num_retained, len(keys)))
            keys = keys[taken]
            scores = np.concatenate([scores, summed])[taken]
            which = np.concatenate([which, numbers])[taken]
        grown = [self._grow(self.running[int(i) // vocab], int(i) % vocab) for i in which]
        ended = np.array([self._has_ended(sequence) for sequence in grown])
        self._keep_running(grown, scores, ended)
        self._keep_finished(grown, scores, ended)
        self._n_tokens += 1
        self._can_improve = self._can_improve and self._may_improve()
        is_full = self._rules.early_stopping is True and None not in self._finished
        self.is_over = not self._can_improve or is_full or bool(ended.all())

    def best(self, n: int) -> list[tuple[T, float]]:
        """Return the best n finished sequences with scores, best first; fewer if fewer ended."""
        ranked = zip(self._finished, self._finished_scores, strict=True)
        return [(seq, float(score)) for seq, score in ranked if seq is not None][:n]

    def best_running(self) -> tuple[T, float]:
        """Return the best unfinished sequence, and its score if it ended here."""
        return self.running[0], float(self._scores[0] / self._length_divisor(self._n_tokens))

    # --- parts -----------------------------------------------------------------------------

    def _keep_running(self, grown: list[T], scores: Scores, ended: NDArray[np.bool_]) -> None:
        alive: Scores = scores + np.where(ended, LOWEST, np.float32(0.0))
        order = _descending(alive)[: self._rules.num_beams]
        self.running = [grown[i] for i in order]
        self._scores = alive[order]

    def _keep_finished(self, grown: list[T], scores: Scores, ended: NDArray[np.bool_]) -> None:
        rules = self._rules
        may_enter = ended & (np.arange(len(grown)) < rules.num_beams)
        final = scores / self._length_divisor(self._n_tokens + 1)
        if rules.early_stopping is True and None not in self._finished:
            final = final + LOWEST
        if not self._can_improve:
            final = final + LOWEST
        final = final + np.where(may_enter, np.float32(0.0), LOWEST)
        merged_scores = np.concatenate([self._finished_scores, final])
        entering = (seq if is_new else None for seq, is_new in zip(grown, may_enter, strict=True))
        merged = [*self._finished, *entering]
        order = _descending(merged_scores)[: rules.num_beams]
        self._finished = [merged[i] for i in order]
        self._finished_scores = merged_scores[order]

    def _may_improve(self) -> bool:
        """Return whether the best running beam could still beat the worst finished one."""
        rules, length = self._rules, self._n_tokens
        if rules.early_stopping == "never" and rules.length_penalty > 0.0:
            length = rules.max_new_tokens
        best_possible = self._scores[0] / self._length_divisor(length)
        worst = self._finished_scores.min()
        is_open = None in self._finished
        return bool(best_possible > worst or (is_open and best_possible > LOWEST))

    def _length_divisor(self, length: int) -> np.float32:
        return np.float32(max(length, 1) ** self._rules.length_penalty)


def by_score(scores: Scores, _: NDArray[np.int64]) -> Scores:
    """Return the scores as keys, for the best continuations."""
    return scores


def best_continuations(keys: NDArray[Any], k: int) -> NDArray[np.int64]:
    """Return the positions of the k largest keys, largest first; ties in order of position."""
    threshold = np.partition(keys, len(keys) - k)[len(keys) - k]
    candidates = np.flatnonzero(keys >= threshold)
    return candidates[_descending(keys[candidates])][:k]


def _descending(scores: NDArray[Any]) -> NDArray[np.int64]:
    return np.argsort(-scores, kind="stable")
