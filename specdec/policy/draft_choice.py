"""Whether to draft with the model at all: a choice between two measured ways.

It compares what recent rounds of either kind cost and brought. The kind that is not in use is
tried now and then, because texts and machines change; what that costs is kept to a small share of
the time.
"""

from __future__ import annotations

from specdec.policy.allowance import Allowance

_HYSTERESIS = 1.03  # the other way must look this much faster
_FADE_IN_USE = 2.0 ** (-1 / 32)  # weight of a round after the next one of its kind
_FADE_AT_FIRST, _FADE_STEP = 0.8, 0.1  # after the first round; more after each further one
_FADE_IDLE = 2.0 ** (-1 / 128)  # after a round of the other kind
_BIAS_STRENGTH = 2.0  # tokens: how many it takes to doubt the calibrated expectation
_PLAN_WEIGHT = 0.5  # rounds that the plan's word for a way counts as
_ALLOWANCE = 2.0
"""Tokens that a draft may lose before it was ever right: a text of 64 keeps 0.95 of its speed with
a loss of 3.2 (rounds overdraw a little, and time adds its share)."""
_STAKE = 0.5  # of what is left may be lost in one round: a second failure has half as much
FIRST_INTERVAL, LONGEST_INTERVAL = 6, 64  # rounds between probes


class Pace:
    """Tokens per second of one way of decoding: fading sums over its rounds.

    Tokens are the calibrated expectations, which scatter less than what came out, times the ratio
    of what came out to what was expected, which is near 1 once the calibration has learnt. Until
    then later rounds know better than earlier ones, and those better than the plan.
    """

    def __init__(self, tokens: float, seconds: float, weight: float) -> None:
        self._n = weight
        self._expected = self._actual = weight * tokens
        self._seconds = weight * seconds
        self._n_rounds = 0

    def add(self, expected: float, actual: float, seconds: float) -> None:
        self.fade(min(_FADE_AT_FIRST + _FADE_STEP * self._n_rounds, _FADE_IN_USE))
        self._n_rounds += 1
        self._n += 1.0
        self._expected += expected
        self._actual += actual
        self._seconds += seconds

    def fade(self, factor: float) -> None:
        self._n *= factor
        self._expected *= factor
        self._actual *= factor
        self._seconds *= factor

    @property
    def tokens(self) -> float:
        """Per round."""
        bias = (self._actual + _BIAS_STRENGTH) / (self._expected + _BIAS_STRENGTH)
        return bias * self._expected / self._n

    @property
    def seconds(self) -> float:
        """Per round."""
        return self._seconds / self._n

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class DraftChoice:
    """With the draft model or without it (n-grams alone, or plain decoding).

    Args:
        with_draft: (tokens, seconds) of a round as planned; None where there is no draft model.
        plain_seconds: of a pass of one token as planned.
    """

    def __init__(self, with_draft: tuple[float, float] | None, plain_seconds: float) -> None:
        self._paces = {False: Pace(1.0, plain_seconds, weight=_PLAN_WEIGHT)}
        if with_draft is not None:
            self._paces[True] = Pace(*with_draft, weight=_PLAN_WEIGHT)
        self._settled = max(self._paces, key=lambda kind: self._paces[kind].rate)
        self._allowances = {True: Allowance(_ALLOWANCE), False: Allowance(0.0)}
        self._plain_seconds = plain_seconds
        self._entry = _ALLOWANCE  # tokens that a draft which is not in use may put by
        self._interval = FIRST_INTERVAL
        self._n_settled = 0  # rounds since the last probe
        self._n_alone = 0  # rounds without the draft
        self._is_winning = False  # the last round was a probe that paid
        self._is_alone_known = False

    @property
    def is_drafting(self) -> bool:
        """The way in use."""
        return self._settled

    @property
    def rate(self) -> float:
        """Tokens per second of the way in use: what a second is worth."""
        return self._paces[self._settled].rate

    @property
    def is_on_trial(self) -> bool:
        """Whether the draft has not yet won more than it lost.

        It is to show with small trees what it is worth: at first, and after it was given up.
        """
        return self._allowances[True].tokens <= self._entry

    @property
    def stake_seconds(self) -> float:
        """What a round on trial may take beyond a plain pass."""
        return _STAKE * max(0.0, self._allowances[True].tokens) * self._plain_seconds

    def note_plain(self, seconds: float, is_known: bool = False) -> None:
        """What a pass of one token takes, by what is known of passes.

        is_known: that is all of a round without the draft, and was measured: trying one would teach
            nothing.
        """
        self._is_alone_known = is_known
        self._plain_seconds = seconds
        if is_known or not self._n_alone:
            weight = 1.0 if is_known else _PLAN_WEIGHT
            self._paces[False] = Pace(1.0, seconds, weight)

    def next_uses_draft(self, draft_seconds: float) -> bool:
        """For the next round.

        draft_seconds: what the smallest round with the draft takes beyond a plain pass.
        """
        if len(self._paces) == 1:
            return False
        price = draft_seconds / self._plain_seconds
        # One that is too dear is tried again, too: it may have been measured in a bad hour.
        self._entry = max(_ALLOWANCE, price)
        is_affordable = price <= self._allowances[True].tokens
        here, there = self._paces[self._settled], self._paces[not self._settled]
        is_better = there.rate > _HYSTERESIS * here.rate
        if (is_better or not is_affordable) if self._settled else (is_better and is_affordable):
            self._settle(not self._settled)
            return self._settled
        if self._settled:
            return not self._may_probe(self._is_alone_affordable())
        return self._may_probe(is_affordable)

    def record(
        self,
        uses_draft: bool,
        expected: float,
        actual: float,
        seconds: float,
        extra_seconds: float = 0.0,
    ) -> None:
        """A round brought `actual` tokens, of `expected` ones, in so many seconds.

        extra_seconds: that it took beyond those for having changed the way.
        """
        is_winning = actual > seconds * self.rate
        if len(self._paces) > 1:
            self._account(uses_draft, actual, seconds + extra_seconds)
        for kind, pace in self._paces.items():
            if kind == uses_draft:
                pace.add(expected, actual, seconds)
            else:
                pace.fade(_FADE_IDLE)
        self._n_alone += not uses_draft
        if uses_draft == self._settled:
            self._is_winning = False
            self._n_settled += 1
            return
        self._is_winning = is_winning
        self._n_settled = 0
        longer = FIRST_INTERVAL if self._is_winning else 2 * self._interval
        self._interval = min(longer, LONGEST_INTERVAL)

    def _account(self, uses_draft: bool, actual: float, seconds: float) -> None:
        # A draft is held to plain decoding, which is sure. What n-grams bring alone scatters: a
        # lucky passage of theirs would make every round of a good draft a loss.
        rates = {True: 1.0 / self._plain_seconds, False: self._paces[True].rate}
        for kind, allowance in self._allowances.items():
            worth = seconds * rates[kind]
            allowance.pass_time(worth)
            if kind == uses_draft and (kind or self._settled):  # plain decoding needs no leave
                allowance.settle_up(actual, worth)
        if not self._settled:
            self._allowances[True].limit(self._entry)

    def _settle(self, kind: bool) -> None:
        self._settled = kind
        self._interval, self._n_settled = FIRST_INTERVAL, 0
        self._is_winning = False

    def _may_probe(self, is_affordable: bool) -> bool:
        """Whether a round of the other kind is due; one that paid is followed by another one."""
        return self._is_winning or (is_affordable and self._n_settled >= self._interval)

    def _is_alone_affordable(self) -> bool:
        here, there = self._paces[True], self._paces[False]
        if self._is_alone_known:
            return False
        return there.seconds * here.rate - there.tokens <= self._allowances[False].tokens
