"""State of a sequence in its grammar, as a function of its tokens alone.

A matcher of llguidance has one position. Verifying a draft tree, and drafting it, ask about many
prefixes that have most of their tokens in common, so the matcher is rolled back to where two
prefixes part, and advanced from there: a token costs one mask, not a replay of the sequence.

    last prefix   {  "name"  :            next prefix     {  "name"  ,
    matcher       {  "name"  :   ------>  back by one, on by one:  {  "name"  ,

An end-of-sequence token is never given to the matcher: it may come wherever the text may end, and
nothing comes after it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.contract.sequence import common_length
from offload.errors import SpecdecError
from specdec.grammar.constraint import Constraint

Mask = NDArray[np.bool_]


class GrammarError(SpecdecError):
    """llguidance gave up on a sequence, whose state is beyond its limits."""


class GrammarState:
    """Allowed tokens after each prefix of a sequence; for one thread at a time.

    Args:
        matcher: llguidance's matcher at its start; owned by the state from now on.
        constraint: the constraint of the matcher, for messages.
        prompt_length: tokens of the prompt, which the grammar does not cover.
        end_ids: end-of-sequence tokens.
    """

    def __init__(
        self,
        matcher: Any,
        constraint: Constraint,
        prompt_length: int,
        end_ids: Collection[int],
    ) -> None:
        self._matcher = matcher
        self._constraint = constraint
        self._prompt_length = prompt_length
        self._end_ids = sorted(end_ids)
        self._tokens: list[int] = []  # consumed by the matcher

    def fork(self) -> GrammarState:
        """Return an independent state, for another thread or another user of the sequence."""
        other = GrammarState(
            self._matcher.deep_copy(), self._constraint, self._prompt_length, self._end_ids
        )
        other._tokens = list(self._tokens)
        return other

    def allowed(self, prefix_ids: Sequence[int], n_tokens: int) -> Mask:
        """Return the mask of the ids below n_tokens that may follow a prefix; none after its end.

        Raises GrammarError.
        """
        mask = np.zeros(n_tokens, dtype=np.bool_)
        if not self._move_to(prefix_ids):
            return mask
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        known = np.unpackbits(bits, count=min(n_tokens, 8 * len(bits)), bitorder="little")
        mask[: len(known)] = known
        mask[self._ends(n_tokens)] = bool(self._matcher.is_accepting())
        return mask

    def allows(self, prefix_ids: Sequence[int], token: int) -> bool:
        """Return whether a token may follow; faster than a whole mask."""
        if not self._move_to(prefix_ids):
            return False
        if token in self._end_ids:
            return bool(self._matcher.is_accepting())
        return self._move_to([*prefix_ids, token])

    def forced(self, prefix_ids: Sequence[int], n_tokens: int) -> list[int]:
        """Return the tokens that must follow: at each of them the mask allows no other token.

        An end-of-sequence token is included where there is only one. The tokens stop before the
        first that is not below n_tokens, as a tokenizer may have more tokens than its model.
        """
        if not self._move_to(prefix_ids):
            return []
        tokens = [int(token) for token in self._matcher.compute_ff_tokens()]
        self._check()
        is_whole = self._move_to([*prefix_ids, *tokens]) and self._matcher.is_stopped()
        if is_whole and len(self._end_ids) == 1:
            tokens += self._end_ids
        return list(takewhile(lambda token: token < n_tokens, tokens))

    def ends_only(self, mask: Mask) -> bool:
        """Return whether a mask of `allowed` leaves only end-of-sequence tokens."""
        ends = self._ends(len(mask))
        return bool(mask[ends].any()) and np.count_nonzero(mask) == np.count_nonzero(mask[ends])

    def _ends(self, n_tokens: int) -> list[int]:
        return [token for token in self._end_ids if token < n_tokens]

    def _move_to(self, prefix_ids: Sequence[int]) -> bool:
        """Move the matcher to the end of a prefix; return whether that follows the grammar."""
        generated = list(prefix_ids[self._prompt_length :])
        n_common = common_length(self._tokens, generated)
        n_back = len(self._tokens) - n_common
        if n_back:
            self._matcher.rollback(n_back)
            del self._tokens[n_common:]
        new = generated[n_common:]
        if any(token in self._end_ids for token in new):
            return False
        n_consumed = int(self._matcher.try_consume_tokens(new)) if new else 0
        self._check()
        self._tokens += new[:n_consumed]
        return n_consumed == len(new)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(
                f"{self._constraint.refuse(self._matcher.get_error())}: make it simpler"
            )
