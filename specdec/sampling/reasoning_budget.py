"""A limit of a model's reasoning, after which the text that ends it is forced.

As the reasoning budget of llama.cpp (common/reasoning-budget.cpp): nothing is cut inside of a
character, and a reasoning that ends by itself in time is left as it is. There it is a sampler with
a state; here a function of the prefix, since positions of a draft tree are verified in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from specdec.sampling.processors import Ids, NumpyProcessor, Scores, force

_MAX_OPENING = 64
"""Output tokens in which the reasoning has to begin; one that begins later has no limit."""
_MAX_PARTS = 4
"""Tokens that a character may have: so many more, at most, complete it."""
_CUT_OFF = "\ufffd"


@dataclass(frozen=True)
class ReasoningMarks:
    """Texts around reasoning.

    opens, closes: any of them begins or ends it. ending: is forced where the budget ends.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    ending: str


class ReasoningBudget(NumpyProcessor):
    """Logits processor that ends a reasoning after `max_tokens`.

    Args:
        marks: its texts, and forced: tokens of the ending.
        prompt_length: tokens of the prompt.
        is_open: whether the prompt ends inside of the reasoning.
        written: returns the text of tokens, control tokens written out.
    """

    def __init__(
        self,
        max_tokens: int,
        marks: ReasoningMarks,
        forced: Sequence[int],
        prompt_length: int,
        is_open: bool,
        written: Callable[[Sequence[int]], str],
    ) -> None:
        self._max_tokens, self._marks, self._forced = max_tokens, marks, list(forced)
        self._prompt_length, self._is_open, self._written = prompt_length, is_open, written
        # Positions of a sequence share all but their last tokens.
        self._begin = lru_cache(maxsize=64)(self._find_begin)
        self._end = lru_cache(maxsize=64)(self._find_end)

    def __call__(self, prefix: Ids, scores: Scores) -> Scores:
        output = prefix[self._prompt_length :]
        if len(output) < self._max_tokens:
            return scores
        begin = 0 if self._is_open else self._begin(output[:_MAX_OPENING].tobytes())
        if begin is None or len(output) < begin + self._max_tokens:
            return scores
        limit = begin + self._max_tokens
        end = self._end(output[begin : limit + _MAX_PARTS].tobytes())
        if end is None:
            return scores
        behind = output[begin + end :].tolist()
        n = len(behind)
        if n >= len(self._forced) or behind != self._forced[:n]:
            return scores
        return force([self._forced[n]])(prefix, scores)

    def _find_begin(self, raw: bytes) -> int | None:
        """Return the number of tokens up to the begin of the reasoning; None if there is none."""
        ids = np.frombuffer(raw, dtype=np.int64).tolist()
        if not self._has(self._marks.opens, ids):
            return None
        return next(n for n in range(1, len(ids) + 1) if self._has(self._marks.opens, ids[:n]))

    def _find_end(self, raw: bytes) -> int | None:
        """Return the number of reasoning tokens before the forced ones; None if none are forced:
        it has ended by itself, or a character is incomplete."""
        ids = np.frombuffer(raw, dtype=np.int64).tolist()
        for n in range(self._max_tokens, len(ids) + 1):
            if self._has(self._marks.closes, ids[:n]):
                return None
            is_last = n == self._max_tokens + _MAX_PARTS
            if is_last or not self._written(ids[max(n - 2 * _MAX_PARTS, 0) : n]).endswith(_CUT_OFF):
                return n
        return None

    def _has(self, marks: Sequence[str], ids: Sequence[int]) -> bool:
        text = self._written(ids)
        return any(mark in text for mark in marks)
