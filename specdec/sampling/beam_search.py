"""Beam search and beam-search sampling as transformers' `generate` does them, without a model.

The state follows `GenerationMixin._beam_search` of transformers 5.17 to 5.23 for a batch of one, in
float32 like there, so that equal log-probabilities give equal sequences:

    running    num_beams unfinished sequences, each with the sum of its processed log-probabilities
    finished   the best num_beams sequences that ended, by sum / length^length_penalty

A step takes the best K = max(2, 1 + n_eos) * num_beams continuations of all running beams together
(greedy), or draws K of them without replacement (sampling). Those that end may enter `finished` if
they are among the first num_beams; the best num_beams of the others run on.

Where scores tie, the lower (beam, token) comes first; torch's topk leaves that open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float32]
Rank = Callable[[Scores, NDArray[np.int64]], NDArray[Any]]
"""(scores [n], which continuations they are of [n]) -> keys [n]; those with the largest are taken.

Continuation i is token i % vocab after beam i // vocab.
"""

LOWEST = np.float32(-1.0e9)
"""What transformers adds to the score of a beam that must not be chosen."""

T = TypeVar("T")


@dataclass(frozen=True)
class BeamRules:
    """How beams are kept and ranked.

    Attributes:
        num_beams: sequences that run at a time.
        length_penalty: exponent of the length that a finished sequence's score is divided by.
        early_stopping: True ends the search with num_beams finished sequences; False when the best
            running beam cannot enter them at its present length; "never" when it cannot at any.
        n_eos: tokens that end a sequence.
        max_new_tokens: most tokens of a sequence.
    """

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    n_eos: int = 1
    max_new_tokens: int = 64

    @property
    def num_retained(self) -> int:
        """Continuations taken in a step: so many that num_beams of them do not end with an EOS."""
        return max(2, 1 + self.n_eos) * self.num_beams


class BeamSearch(Generic[T]):
    """One search over sequences of the caller's own type T.

    Args:
        rules: see there.
        root: the empty sequence.
        grow: (running sequence, token) -> the sequence with that token at its end.
        has_ended: whether a sequence must not go on (end of sequence, stop string, length).
        rank: `by_score`, or for a draw without replacement scores with Gumbel noise.
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
        # All beams but one count as dead, so that the first tokens all come from the root.
        self._scores = np.full(n_beams, LOWEST, dtype=np.float32)
        self._scores[0] = 0.0
        self._finished: list[T | None] = [None] * n_beams
        self._finished_scores = np.full(n_beams, LOWEST, dtype=np.float32)
        self._n_tokens = 0
        self._can_improve = True
        self.is_over = False

    def advance(self, log_probs: Iterable[Scores]) -> None:
        """Lengthen all running beams by a token.

        log_probs: num_beams rows [vocab] of processed log-probabilities, after each of `running`;
            no two of them have to be in memory together.
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
        ended = np.array([self._has_ended(item) for item in grown])
        self._keep_running(grown, scores, ended)
        self._keep_finished(grown, scores, ended)
        self._n_tokens += 1
        self._can_improve = self._can_improve and self._may_improve()
        is_full = self._rules.early_stopping is True and None not in self._finished
        self.is_over = not self._can_improve or is_full or bool(ended.all())

    def best(self, n: int) -> list[tuple[T, float]]:
        """The best n finished sequences and their scores, best first; fewer if fewer ended."""
        ranked = zip(self._finished, self._finished_scores, strict=True)
        return [(item, float(score)) for item, score in ranked if item is not None][:n]

    def best_running(self) -> tuple[T, float]:
        """The best unfinished sequence and what its score would be if it ended here."""
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
        entering = (item if is_new else None for item, is_new in zip(grown, may_enter, strict=True))
        merged = [*self._finished, *entering]
        order = _descending(merged_scores)[: rules.num_beams]
        self._finished = [merged[i] for i in order]
        self._finished_scores = merged_scores[order]

    def _may_improve(self) -> bool:
        """Whether the best running beam could still beat the worst finished one."""
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
    """Keys for the best continuations."""
    return scores


def best_continuations(keys: NDArray[Any], k: int) -> NDArray[np.int64]:
    """Positions of the k largest keys, largest first; of equal ones the first ones first."""
    threshold = np.partition(keys, len(keys) - k)[len(keys) - k]
    candidates = np.flatnonzero(keys >= threshold)
    return candidates[_descending(keys[candidates])][:k]


def _descending(scores: NDArray[Any]) -> NDArray[np.int64]:
    return np.argsort(-scores, kind="stable")
