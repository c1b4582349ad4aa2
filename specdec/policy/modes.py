"""Which way to decode: with the draft model or without it, drafting ahead or not.

One rule for both. The way that is used is the one that brings more for its seconds, by what its
rounds have shown. What is not in use is tried when it can pay for it: it has a credit, which
grows by a small share of the text, and is charged with what it loses. So a draft that never pays
costs that share and its first credit, however promising it looks and whatever makes it slow (Wu et
al. 2016, Conservative bandits).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from specdec.policy.fading import LASTING, RECENT, FadingMean, kept_numbers

_CREDIT_SHARE = 0.015
"""Of the text's tokens (for drafting ahead: of its seconds), that trials of the way not in use may
lose: with it a draft that never pays keeps 0.98 of a long text's speed, and one that becomes good
is in use after some 100 tokens."""
_FIRST_CREDIT = 2.0
"""Tokens that a draft may lose before it was ever right: a text of 64 keeps 0.95 of its speed with
a loss of 3.2, and rounds overdraw a little."""
_STAKE = 0.5
"""Share of the credit that may be lost in one round: a second failure has half as much
(bench/worlds: with all levels from the beginning, useless drafts keep 0.94 over 64 tokens)."""
_LEAST_STAKE = _STAKE**2 * _FIRST_CREDIT
"""Tokens that a trial is charged with, however little it loses: the stake of a second failure
(bench/worlds: with a twenty-fifth of it, 0.90 of the speed over 64 tokens of noisy passes)."""
_PLAN_WEIGHT = 4.0
"""Rounds that the plan's word for a way counts as (bench/worlds: 0.99 of the speed with one)."""
_LEAST_GAIN = 0.05
"""Of a round's seconds: drafting that takes less is not worth a trial of drafting ahead, as passes
scatter by as much; and a trial is charged with so much at least."""


class Outcome(NamedTuple):
    """Of one text's part of a round.

    extra_seconds: beyond those, for having begun to use the draft again.
    """

    n_tokens: float
    seconds: float
    extra_seconds: float = 0.0


class DraftChoice:
    """With the draft model or without it.

    A draft is held to plain decoding, which is sure, where n-grams go on without it, too: what they
    bring scatters, and a lucky passage of theirs would make every round of a good draft a loss.

    Args:
        with_draft: (tokens, seconds) of a round as planned; None where there is no draft model.
        plain_seconds: of a pass of one token, as planned; to be kept up to date.
    """

    def __init__(self, with_draft: tuple[float, float] | None, plain_seconds: float) -> None:
        # It fades as what is known of the draft does: both follow a change at the same pace.
        self._plain = FadingMean(LASTING, (plain_seconds,), _PLAN_WEIGHT)
        self._draft = None
        if with_draft is not None:
            self._draft = FadingMean(LASTING, with_draft, _PLAN_WEIGHT)
        self._credit = _FIRST_CREDIT
        self.plain_seconds = plain_seconds

    @property
    def is_draft_better(self) -> bool:
        """By what is known; one that has no credit left rests all the same."""
        return self._draft is not None and self.rate > self._plain_rate

    @property
    def rate(self) -> float:
        """Tokens per second of the better way: what a second is worth."""
        if self._draft is None:
            return self._plain_rate
        tokens, seconds = self._draft.means
        return max(self._plain_rate, tokens / max(seconds, 1e-9))

    @property
    def stake_seconds(self) -> float:
        """What a round with the draft may take beyond a plain pass."""
        return _STAKE * max(0.0, self._credit) * self.plain_seconds

    def kept(self) -> dict[str, Any]:
        return {
            "plain": self._plain.kept(),
            "draft": None if self._draft is None else self._draft.kept(),
            "credit": self._credit,
        }

    def restore(self, kept: Any) -> None:
        """What another process saw counts as much as the plan's word. Raises ValueError."""
        self._plain.restore(kept["plain"])
        if self._draft is not None:
            self._draft.restore(kept["draft"])
        credit = float(kept_numbers(kept["credit"], ()))
        self._credit = min(max(credit, -_FIRST_CREDIT), _PLAN_WEIGHT * _FIRST_CREDIT)

    def next_uses_draft(self, draft_seconds: float) -> bool:
        """For the next round.

        draft_seconds: what the smallest round with the draft takes beyond a plain pass.
        """
        if self._draft is None:
            return False
        price = draft_seconds / self.plain_seconds
        if not self.is_draft_better:
            # What it once won does not count for what a trial may lose.
            self._credit = min(self._credit, max(_FIRST_CREDIT, price))
            price = max(_LEAST_STAKE, price)
        return self._credit >= price

    def record(self, uses_draft: bool, outcome: Outcome, n_texts: int = 1) -> None:
        """A round of so many texts, which share this choice, with the mean of their outcomes."""
        is_trial, rate = not self.is_draft_better, self.rate
        self._plain.add(self.plain_seconds, n=n_texts)
        self._credit += _CREDIT_SHARE * outcome.n_tokens
        if self._draft is None or not uses_draft:
            return
        self._draft.add(outcome.n_tokens, outcome.seconds, n=n_texts)
        seconds = outcome.seconds + outcome.extra_seconds
        gain = outcome.n_tokens - seconds / self.plain_seconds
        if is_trial and outcome.n_tokens <= seconds * rate:
            gain = min(gain, -_LEAST_STAKE)
        self._credit = max(self._credit + gain, -_FIRST_CREDIT)

    @property
    def _plain_rate(self) -> float:
        return 1.0 / max(self._plain.means[0], 1e-9)


class AheadChoice:
    """Whether to draft the next tree while the pass runs.

    It saves the drafting that it hides, and costs what it slows the pass: both are seconds of a
    round. The first trial is free; those after it are paid by a share of the time.
    """

    def __init__(self) -> None:
        self._drafting = FadingMean(RECENT, (0.0,), 0.0)  # seconds, after a pass without it
        self._not_hidden = FadingMean(RECENT, (0.0,), 0.0)  # seconds, after one with it
        self._slowdown = FadingMean(RECENT, (0.0,), 0.0)
        self._credit_seconds, self._is_on_trial = math.inf, False

    @property
    def slowdown(self) -> float:
        """How many times as long a pass takes with drafting beside it."""
        return max(1.0, *self._slowdown.means)

    def kept(self) -> list[list[float]]:
        return [mean.kept() for mean in (self._drafting, self._not_hidden, self._slowdown)]

    def restore(self, kept: Any) -> None:
        """What another process measured counts as one round. Raises ValueError."""
        means = (self._drafting, self._not_hidden, self._slowdown)
        for mean, value in zip(means, kept, strict=True):
            mean.restore(value)

    def record_drafting(self, is_ahead: bool, seconds: float) -> None:
        """Drafting that nothing hid, after a pass with (or without) drafting beside it."""
        (self._not_hidden if is_ahead else self._drafting).add(seconds)

    def record_pass(self, is_ahead: bool, ratio: float) -> None:
        """It took so many times as long as such a pass without drafting beside it usually does.

        That is kept up to date by passes of the way in use, so that only trials tell more.
        """
        if self._is_on_trial:
            self._slowdown.add(ratio if is_ahead else self.slowdown / ratio)

    def next_is_ahead(self, pass_seconds: float) -> bool:
        """For the pass that is about to begin."""
        (drafting,), (not_hidden,) = self._drafting.means, self._not_hidden.means
        seconds = drafting + pass_seconds
        least = _LEAST_GAIN * seconds
        gain = drafting - not_hidden - (self.slowdown - 1.0) * pass_seconds
        self._credit_seconds += _CREDIT_SHARE * seconds
        self._is_on_trial = drafting > least and self._credit_seconds >= max(abs(gain), least)
        if self._is_on_trial:
            self._credit_seconds = 0.0
        return (self._slowdown.is_measured and gain > 0.0) != self._is_on_trial
