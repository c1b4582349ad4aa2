"""What trying a way of decoding may cost, so that finding out is never dear."""

from __future__ import annotations

_SHARE = 0.015
"""Of all that is decoded: long texts change, so that a way which lost is tried again."""
_LEAST = -4.0
"""Tokens. What one round loses beyond that was hardly the way's own fault (the machine stood
still), and would take thousands of tokens to forget."""


class Allowance:
    """Tokens that one way of decoding may still lose against another one.

    That is a draft against plain decoding, and a trial without the draft against drafting.
    A token is lost for every one that the other way would have brought in the same time. What the
    way loses is taken off, what it wins is put by, and time adds a small share; little is put by
    while the way is not in use. So a way that never pays loses that and the share in all, however
    long it looks promising and whatever makes it slow.
    """

    def __init__(self, tokens: float) -> None:
        self.tokens = tokens

    def pass_time(self, worth: float) -> None:
        """A round has taken the time of so many tokens."""
        self.tokens += _SHARE * worth

    def settle_up(self, tokens: float, worth: float) -> None:
        """A round of this way brought `tokens` in the time of `worth` tokens of the other one."""
        self.tokens = max(self.tokens + tokens - worth, _LEAST)

    def limit(self, at_most: float) -> None:
        """The way is not in use: what it once won does not count for what it loses now."""
        self.tokens = min(self.tokens, at_most)
