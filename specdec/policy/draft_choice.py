"""Whether to draft with the model at all: a choice between two measured modes.

It compares what recent rounds of either mode cost and brought. The mode that is not in use is
tried now and then, because texts and machines change; what that costs is kept to a small share of
the time (`RegretBudget`).
"""

from __future__ import annotations

_HYSTERESIS = 1.03  # the other mode must look this much faster
_FADE_IN_USE = 2.0 ** (-1 / 32)  # weight of a round after the next one of its mode
_FADE_AT_FIRST, _FADE_STEP = 0.8, 0.1  # after the first round; more after each further one
_FADE_IDLE = 2.0 ** (-1 / 128)  # after a round of the other mode
_BIAS_STRENGTH = 2.0  # tokens: how many it takes to doubt the calibrated expectation
_PLAN_WEIGHT = 0.5  # rounds that the plan's word for a mode counts as
_FIRST_REGRET = 2.0
"""Tokens that a draft may lose before it was ever right: a text of 64 keeps 0.95 of its speed with
a loss of 3.2 (rounds overdraw a little, and time adds its share)."""
_STAKE = 0.5  # of what is left may be lost in one round: a second failure has half as much
FIRST_INTERVAL, LONGEST_INTERVAL = 6, 64  # rounds between probes
_REGRET_SHARE = 0.015
"""Of all that is decoded: long texts change, so that a mode which lost is tried again."""
_LEAST_LEFT = -4.0
"""Tokens, below which a balance never falls. A round that loses more was most likely held up by
something else on the machine, and the small share that time adds (`_REGRET_SHARE`) would take
thousands of tokens to make it up."""


class RegretBudget:
    """Tokens that one mode of decoding may still lose against another one (its regret).

    That is a draft against plain decoding, and a trial without the draft against drafting.
    A token is lost for every one that the other mode would have brought in the same time. What the
    mode loses is taken off, what it wins is put by, and time adds a small share; little is put by
    while the mode is not in use. So a mode that never pays loses that and the share in all, however
    long it looks promising and whatever makes it slow.
    """

    def __init__(self, tokens: float) -> None:
        self.tokens = tokens

    def pass_time(self, worth: float) -> None:
        """A round has taken the time of so many tokens."""
        self.tokens += _REGRET_SHARE * worth

    def settle_up(self, tokens: float, worth: float) -> None:
        """A round of this mode brought `tokens` in the time of `worth` tokens of the other one."""
        self.tokens = max(self.tokens + tokens - worth, _LEAST_LEFT)

    def limit(self, at_most: float) -> None:
        """The mode is not in use: what it once won does not count for what it loses now."""
        self.tokens = min(self.tokens, at_most)


class Pace:
    """Tokens per second of one mode of decoding: fading sums over its rounds.

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
        self._uses_draft = max(self._paces, key=lambda mode: self._paces[mode].rate)
        self._regrets = {True: RegretBudget(_FIRST_REGRET), False: RegretBudget(0.0)}
        self._plain_seconds = plain_seconds
        self._entry = _FIRST_REGRET  # tokens that a draft which is not in use may put by
        self._interval = FIRST_INTERVAL
        self._n_settled = 0  # rounds since the last probe
        self._n_alone = 0  # rounds without the draft
        self._is_winning = False  # the last round was a probe that paid
        self._is_alone_known = False

    @property
    def uses_draft(self) -> bool:
        """The mode in use."""
        return self._uses_draft

    @property
    def rate(self) -> float:
        """Tokens per second of the mode in use: what a second is worth."""
        return self._paces[self._uses_draft].rate

    @property
    def is_on_trial(self) -> bool:
        """Whether the draft has not yet won more than it lost.

        It is to show with small trees what it is worth: at first, and after it was given up.
        """
        return self._regrets[True].tokens <= self._entry

    @property
    def stake_seconds(self) -> float:
        """What a round on trial may take beyond a plain pass."""
        return _STAKE * max(0.0, self._regrets[True].tokens) * self._plain_seconds

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
        self._entry = max(_FIRST_REGRET, price)
        is_affordable = price <= self._regrets[True].tokens
        here, there = self._paces[self._uses_draft], self._paces[not self._uses_draft]
        is_better = there.rate > _HYSTERESIS * here.rate
        if (is_better or not is_affordable) if self._uses_draft else (is_better and is_affordable):
            self._settle(not self._uses_draft)
            return self._uses_draft
        if self._uses_draft:
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

        extra_seconds: that it took beyond those for having changed the mode.
        """
        is_winning = actual > seconds * self.rate
        if len(self._paces) > 1:
            self._account(uses_draft, actual, seconds + extra_seconds)
        for mode, pace in self._paces.items():
            if mode == uses_draft:
                pace.add(expected, actual, seconds)
            else:
                pace.fade(_FADE_IDLE)
        self._n_alone += not uses_draft
        if uses_draft == self._uses_draft:
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
        for mode, regret in self._regrets.items():
            worth = seconds * rates[mode]
            regret.pass_time(worth)
            # A round without the draft is charged only as a trial, while the draft is in use: where
            # decoding without it is the mode in use, its losses are not limited.
            if mode == uses_draft and (mode or self._uses_draft):
                regret.settle_up(actual, worth)
        if not self._uses_draft:
            self._regrets[True].limit(self._entry)

    def _settle(self, uses_draft: bool) -> None:
        self._uses_draft = uses_draft
        self._interval, self._n_settled = FIRST_INTERVAL, 0
        self._is_winning = False

    def _may_probe(self, is_affordable: bool) -> bool:
        """Whether a round of the other mode is due; one that paid is followed by another one."""
        return self._is_winning or (is_affordable and self._n_settled >= self._interval)

    def _is_alone_affordable(self) -> bool:
        here, there = self._paces[True], self._paces[False]
        if self._is_alone_known:
            return False
        return there.seconds * here.rate - there.tokens <= self._regrets[False].tokens
