"""Whether to draft the next tree while the pass runs: a measured choice."""

from __future__ import annotations

from specdec.policy.draft_choice import FIRST_INTERVAL, LONGEST_INTERVAL

_FADE = 0.9
_ENOUGH = 2.0  # fading count of rounds before a figure is believed
_BLOCK = 4  # rounds of one trial: the first of them still drafts as before
_SHARE = 0.015
"""Of the time, that trials of a worse mode may cost, as far as the longest interval allows."""
_WORTH_TRYING = 0.05  # share of a round that drafting must take
_LEAST_GAIN = 0.01  # of a round


class _Mean:
    """A fading mean."""

    def __init__(self) -> None:
        self._sum = self._n = 0.0

    def add(self, value: float) -> None:
        self._sum = self._sum * _FADE + value
        self._n = self._n * _FADE + 1.0

    def value(self, default: float) -> float:
        return self._sum / self._n if self._n else default

    @property
    def is_known(self) -> bool:
        return self._n >= _ENOUGH


class AheadChoice:
    """Whether to draft the next tree while the pass runs.

    It saves the drafting that it hides, and costs what it slows the pass: both are times, measured
    in rounds with and without it. What passes usually take (`PassTimes`) is kept up to date by
    those of the mode in use, divided by the slowdown where that is with drafting beside them; the
    slowdown by those of the other mode, in a trial.
    """

    def __init__(self) -> None:
        self._drafting = {False: _Mean(), True: _Mean()}  # unhidden seconds, by mode
        self._slowdown = _Mean()  # pass seconds with / without
        self._pass = _Mean()  # seconds without
        self._is_ahead = False
        self._trial_left = 0
        self._n_settled = 0
        self._interval = FIRST_INTERVAL

    @property
    def slowdown(self) -> float:
        """How many times as long a pass takes with drafting beside it."""
        return max(1.0, self._slowdown.value(1.0))

    def record_drafting(self, is_ahead: bool, seconds: float) -> None:
        """Drafting that nothing hid, after a pass with (or without) drafting beside it."""
        self._drafting[is_ahead].add(seconds)

    @property
    def is_on_trial(self) -> bool:
        """Whether the mode that is not in use is being tried."""
        return self._trial_left > 0

    def record_pass(self, is_ahead: bool, seconds: float, usual_seconds: float) -> None:
        """usual_seconds: of such a pass without drafting beside it."""
        self._pass.add(usual_seconds)
        if not self.is_on_trial or is_ahead == self._is_ahead:
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
                return not self._is_ahead
            self._decide()
            return self._is_ahead
        self._n_settled += 1
        if self._n_settled > self._interval and self._is_worth_trying():
            self._trial_left = _BLOCK
            return not self._is_ahead
        return self._is_ahead

    def _is_worth_trying(self) -> bool:
        drafting = self._drafting[False].value(0.0)
        return self._is_ahead or drafting > _WORTH_TRYING * (self._pass.value(0.0) + drafting)

    def _decide(self) -> None:
        """After a trial of the other mode."""
        was, gain = self._is_ahead, 0.0  # gain: share of a round
        if self._slowdown.is_known and all(mean.is_known for mean in self._drafting.values()):
            usual, drafting = self._pass.value(0.0), self._drafting[False].value(0.0)
            saved = drafting - self._drafting[True].value(0.0)
            gain = (saved - (self.slowdown - 1.0) * usual) / (usual + drafting)
            self._is_ahead = gain > (-_LEAST_GAIN if was else _LEAST_GAIN)
        longer = 2 * self._interval if self._is_ahead == was else FIRST_INTERVAL
        affordable = round(_BLOCK * abs(gain) / _SHARE)
        self._interval = min(max(longer, affordable), LONGEST_INTERVAL)
        self._n_settled = 0
