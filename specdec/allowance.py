"""What trying a way of decoding may cost, so that finding out is never dear."""

from __future__ import annotations

import math

_SHARE = 0.015
"""Of all that is decoded: long texts change, so that a way which lost is tried again."""


class Allowance:
    """Tokens that one way of decoding may still lose against the other one.

    A token is lost for every one that the other way would have brought in the same time. What the
    way loses is taken off, what it wins is put by, and time adds a small share; nothing is put by
    beyond `at_most` while the way is not in use. So a way that never pays loses `at_most` and that
    share in all, however long it looks promising and whatever makes it slow.
    """

    def __init__(self, tokens: float, at_most: float = math.inf) -> None:
        self.tokens = tokens
        self._at_most = at_most

    def pass_time(self, worth: float) -> None:
        """A round has taken the time of so many tokens."""
        self.tokens += _SHARE * worth

    def settle_up(self, tokens: float, worth: float) -> None:
        """A round of this way brought `tokens` in the time of `worth` tokens of the other one."""
        self.tokens += tokens - worth

    def limit(self) -> None:
        """The way is not in use: what it once won does not count for what it loses now."""
        self.tokens = min(self.tokens, self._at_most)
