"""Whether to draft with the model at all, and whether ahead of time: two measured choices.

Both compare what recent rounds of either kind cost and brought. The kind that is not in use is
tried now and then, because texts and machines change; what that costs is kept to a small share of
the time.
"""

from __future__ import annotations

from specdec.allowance import Allowance

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
_FIRST_INTERVAL, _LONGEST_INTERVAL = 6, 64  # rounds between probes


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
        self._entry = _ALLOWANCE  # tokens that a draft which is not in use may put by
        self._interval = _FIRST_INTERVAL
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
        """What a round on trial may take beyond one without the draft."""
        return _STAKE * max(0.0, self._allowances[True].tokens) / self._paces[False].rate

    def note_plain(self, seconds: float, is_known: bool = False) -> None:
        """What a pass of one token takes, by what is known of passes.

        is_known: that is all of a round without the draft, and was measured: trying one would teach
            nothing.
        """
        self._is_alone_known = is_known
        if is_known or not self._n_alone:
            weight = 1.0 if is_known else _PLAN_WEIGHT
            self._paces[False] = Pace(1.0, seconds, weight)

    def next_uses_draft(self, draft_seconds: float) -> bool:
        """For the next round.

        draft_seconds: what the smallest round with the draft takes beyond one without it.
        """
        if len(self._paces) == 1:
            return False
        price = draft_seconds * self._paces[False].rate
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
        longer = _FIRST_INTERVAL if self._is_winning else 2 * self._interval
        self._interval = min(longer, _LONGEST_INTERVAL)

    def _account(self, uses_draft: bool, actual: float, seconds: float) -> None:
        for kind, allowance in self._allowances.items():
            worth = seconds * self._paces[not kind].rate
            allowance.pass_time(worth)
            if kind == uses_draft and (kind or self._settled):  # plain decoding needs no leave
                allowance.settle_up(actual, worth)
        if not self._settled:
            self._allowances[True].limit(self._entry)

    def _settle(self, kind: bool) -> None:
        self._settled = kind
        self._interval, self._n_settled = _FIRST_INTERVAL, 0
        self._is_winning = False

    def _may_probe(self, is_affordable: bool) -> bool:
        """Whether a round of the other kind is due; one that paid is followed by another one."""
        return self._is_winning or (is_affordable and self._n_settled >= self._interval)

    def _is_alone_affordable(self) -> bool:
        here, there = self._paces[True], self._paces[False]
        if self._is_alone_known:
            return False
        return there.seconds * here.rate - there.tokens <= self._allowances[False].tokens


_AHEAD_FADE = 0.9
_ENOUGH = 2.0  # fading count of rounds before a figure is believed
_BLOCK = 4  # rounds of one trial: the first of them still drafts as before
_WORTH_TRYING = 0.05  # share of a round that drafting must take
_LEAST_GAIN = 0.01  # of a round


class _Mean:
    """A fading mean."""

    def __init__(self) -> None:
        self._sum = self._n = 0.0

    def add(self, value: float) -> None:
        self._sum = self._sum * _AHEAD_FADE + value
        self._n = self._n * _AHEAD_FADE + 1.0

    def value(self, default: float) -> float:
        return self._sum / self._n if self._n else default

    @property
    def is_known(self) -> bool:
        return self._n >= _ENOUGH


class AheadChoice:
    """Whether to draft the next tree while the pass runs.

    It saves the drafting that it hides, and costs what it slows the pass: both are times, measured
    in rounds with and without it. What passes usually take (`PassTimes`) is kept up to date by
    those of the way in use, divided by the slowdown where that is with drafting beside them; the
    slowdown by those of the other way, in a trial.
    """

    def __init__(self) -> None:
        self._drafting = {False: _Mean(), True: _Mean()}  # unhidden seconds, by kind of round
        self._slowdown = _Mean()  # pass seconds with / without
        self._pass = _Mean()  # seconds without
        self._settled = False
        self._trial_left = 0
        self._n_settled = 0
        self._interval = _FIRST_INTERVAL

    @property
    def slowdown(self) -> float:
        """How many times as long a pass takes with drafting beside it."""
        return max(1.0, self._slowdown.value(1.0))

    def record_drafting(self, is_ahead: bool, seconds: float) -> None:
        """Drafting that nothing hid, after a pass with (or without) drafting beside it."""
        self._drafting[is_ahead].add(seconds)

    @property
    def is_on_trial(self) -> bool:
        """Whether the way that is not in use is being tried."""
        return self._trial_left > 0

    def record_pass(self, is_ahead: bool, seconds: float, usual_seconds: float) -> None:
        """usual_seconds: of such a pass without drafting beside it."""
        self._pass.add(usual_seconds)
        if not self.is_on_trial or is_ahead == self._settled:
            return
        if is_ahead:
            self._slowdown.add(seconds / usual_seconds)
        else:
            self._slowdown.add(self.slowdown * usual_seconds / seconds)

    def next_is_ahead(self) -> bool:
        """For the pass that is about to begin."""
        if self._trial_left:
            self._trial_left -= 1
            if self._trial_left:
                return not self._settled
            self._decide()
            return self._settled
        self._n_settled += 1
        if self._n_settled > self._interval and self._is_worth_trying():
            self._trial_left = _BLOCK
            return not self._settled
        return self._settled

    def _is_worth_trying(self) -> bool:
        drafting = self._drafting[False].value(0.0)
        return self._settled or drafting > _WORTH_TRYING * (self._pass.value(0.0) + drafting)

    def _decide(self) -> None:
        """After a trial of the other kind."""
        was = self._settled
        if self._slowdown.is_known and all(mean.is_known for mean in self._drafting.values()):
            usual, drafting = self._pass.value(0.0), self._drafting[False].value(0.0)
            saved = drafting - self._drafting[True].value(0.0)
            gain = saved - (self.slowdown - 1.0) * usual
            margin = _LEAST_GAIN * (usual + drafting)
            self._settled = gain > (-margin if was else margin)
        longer = 2 * self._interval if self._settled == was else _FIRST_INTERVAL
        self._interval, self._n_settled = min(longer, _LONGEST_INTERVAL), 0
