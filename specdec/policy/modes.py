"""Which way to decode: with the draft model or without it, drafting ahead or not.

One rule for both. The way that is used is the one that brings more for its seconds, by what its
rounds have shown. The other one is tried when it can pay for it: every way has a credit of tokens,
which grows by a small share of the text, and is charged with what its rounds lose. So a way
that never pays costs that share and its first credit, however promising it looks and whatever
makes it slow (Wu et al. 2016, Conservative bandits).
"""

from __future__ import annotations

import numpy as np

from specdec.policy.costs import LASTING, RECENT, kept_numbers, one_measurement

_CREDIT_SHARE = 0.015
"""Of the text's tokens, that trials of the way not in use may lose: with it a draft that never pays
keeps 0.98 of a long text's speed, and one that becomes good is in use after some 100 tokens."""
_FIRST_CREDIT = 2.0
"""Tokens that a draft may lose before it was ever right: a text of 64 keeps 0.95 of its speed with
a loss of 3.2, and rounds overdraw a little."""
_STAKE = 0.5  # of the credit may be lost in one round: a second failure has half as much
_LEAST_STAKE = _STAKE**2 * _FIRST_CREDIT
"""What a trial is charged with, however little it loses: the stake of a second failure."""
_PLAN_WEIGHT = 4.0
"""Rounds that the plan's word for a way counts as: fewer, and one lucky passage of n-grams ends a
good draft (bench/worlds: 0.91 of the speed with 0.5 rounds)."""
_LEAST_GAIN = 0.02
"""Of a round, for drafting ahead: less cannot be told from the scatter of passes."""


class Way:
    """One way of decoding: what its rounds bring, and the tokens that it may still lose.

    Args:
        tokens, seconds: of a round, as planned.
        credit: tokens that it may lose before it was ever of use.
    """

    def __init__(self, tokens: float, seconds: float, credit: float) -> None:
        self._sums = _PLAN_WEIGHT * np.array([1.0, tokens, seconds])
        self.credit = credit

    def add(self, n_tokens: float, seconds: float, n_texts: int = 1) -> None:
        """A round of this way brought each of so many texts so many tokens, and took so many
        seconds for each."""
        self._sums = LASTING**n_texts * self._sums + n_texts * np.array([1.0, n_tokens, seconds])

    def kept(self) -> list[float]:
        return [*self._sums.tolist(), self.credit]

    def restore(self, kept: object) -> None:
        """What another process saw counts as much as the plan's word. Raises ValueError."""
        *sums, credit = kept_numbers(kept, (4,))
        if min(sums) <= 0.0:
            raise ValueError("no rounds")
        self._sums = _PLAN_WEIGHT * np.array(sums) / sums[0]
        self.credit = float(np.clip(credit, -_FIRST_CREDIT, _PLAN_WEIGHT * _FIRST_CREDIT))

    def loss(self, rate: float) -> float:
        """Tokens that a round of it brings less than another way, of that rate, in its time."""
        n, tokens, seconds = self._sums
        return max(0.0, float((rate * seconds - tokens) / n))

    @property
    def rate(self) -> float:
        return float(self._sums[1] / self._sums[2])

    def may_be_tried(self, price: float) -> bool:
        """Where it is not in use: what it once won does not count for what a trial may lose."""
        self.credit = min(self.credit, max(_FIRST_CREDIT, price))
        return self.credit >= max(_LEAST_STAKE, price)


class DraftChoice:
    """With the draft model or without it (n-grams alone, or plain decoding).

    Args:
        with_draft: (tokens, seconds) of a round as planned; None where there is no draft model.
        plain_seconds: of a pass of one token as planned.
    """

    def __init__(self, with_draft: tuple[float, float] | None, plain_seconds: float) -> None:
        self._alone = Way(1.0, plain_seconds, 0.0)
        self._draft = None if with_draft is None else Way(*with_draft, _FIRST_CREDIT)
        self._plain_seconds = plain_seconds
        self._was_alone = self._is_alone_known = False

    @property
    def is_draft_better(self) -> bool:
        """By what is known; one that has no credit left rests all the same."""
        return self._draft is not None and self._draft.rate > self._alone.rate

    @property
    def rate(self) -> float:
        """Tokens per second of the better way: what a second is worth."""
        if self._draft is None:
            return self._alone.rate
        return max(self._alone.rate, self._draft.rate)

    @property
    def stake_seconds(self) -> float:
        """What a round with the draft may take beyond a plain pass."""
        credit = 0.0 if self._draft is None else self._draft.credit
        return _STAKE * max(0.0, credit) * self._plain_seconds

    def kept(self) -> list[list[float]]:
        return [way.kept() for way in (self._alone, self._draft) if way is not None]

    def restore(self, kept: object) -> None:
        """Raises ValueError."""
        ways = [way for way in (self._alone, self._draft) if way is not None]
        if not isinstance(kept, list) or len(kept) != len(ways):
            raise ValueError("no ways of decoding")
        for way, value in zip(ways, kept, strict=True):
            way.restore(value)
        self._was_alone = True

    def note_plain(self, seconds: float, is_known: bool = False) -> None:
        """What a pass of one token takes, by what is known of passes.

        is_known: that is all of a round without the draft, and was measured: trying one would teach
            nothing.
        """
        self._plain_seconds = seconds
        self._is_alone_known = is_known
        if is_known or not self._was_alone:
            self._alone = Way(1.0, seconds, self._alone.credit)

    def next_uses_draft(self, draft_seconds: float) -> bool:
        """For the next round.

        draft_seconds: what the smallest round with the draft takes beyond a plain pass.
        """
        draft, alone = self._draft, self._alone
        if draft is None:
            return False
        price = draft_seconds / self._plain_seconds
        if not self.is_draft_better:
            return draft.may_be_tried(price)
        is_tried = alone.may_be_tried(alone.loss(self.rate)) and not self._is_alone_known
        return draft.credit >= price and not is_tried

    def record(
        self,
        uses_draft: bool,
        n_tokens: float,
        seconds: float,
        extra_seconds: float = 0.0,
        n_texts: int = 1,
    ) -> None:
        """A round brought so many tokens in so many seconds, as a mean over texts that shared it.

        extra_seconds: that it took beyond those for having changed the mode.
        """
        draft, alone = self._draft, self._alone
        if draft is None:
            alone.add(n_tokens, seconds, n_texts)
            return
        is_trial = uses_draft != self.is_draft_better
        all_seconds = seconds + extra_seconds
        for way in (draft, alone):
            way.credit += _CREDIT_SHARE * n_tokens
        way = draft if uses_draft else alone
        if uses_draft or is_trial:
            # A draft is held to plain decoding, which is sure: what n-grams bring alone scatters,
            # and a lucky passage of theirs would make every round of a good draft a loss.
            gain = n_tokens - all_seconds * (1.0 / self._plain_seconds if uses_draft else self.rate)
            if is_trial and n_tokens <= all_seconds * self.rate:
                gain = min(gain, -_LEAST_STAKE)
            way.credit = max(way.credit + gain, -_FIRST_CREDIT)
        way.add(n_tokens, seconds, n_texts)
        self._was_alone |= not uses_draft


class AheadChoice:
    """Whether to draft the next tree while the pass runs.

    It saves the drafting that it hides, and costs what it slows the pass: both are seconds of a
    round. What passes usually take (`PassTimes`) is kept up to date by those of the way in use,
    divided by the slowdown where that is with drafting beside them; the slowdown by trials.
    """

    def __init__(self) -> None:
        self._unhidden: dict[bool, tuple[float, float]] = {False: (0.0, 0.0), True: (0.0, 0.0)}
        self._slowdown = (0.0, 0.0)
        self._credit = _LEAST_STAKE
        self._uses_ahead = self.is_on_trial = False

    @property
    def slowdown(self) -> float:
        """How many times as long a pass takes with drafting beside it."""
        return max(1.0, _mean(self._slowdown))

    def kept(self) -> list[tuple[float, float]]:
        return [self._unhidden[False], self._unhidden[True], self._slowdown]

    def restore(self, kept: object) -> None:
        """What another process measured counts as one round. Raises ValueError."""
        sums = one_measurement(kept_numbers(kept, (3, 2)))
        if (sums < 0.0).any():
            raise ValueError("seconds below zero")
        off, on, slowdown = ((float(n), float(total)) for n, total in sums)
        self._unhidden, self._slowdown = {False: off, True: on}, slowdown

    def record_drafting(self, is_ahead: bool, seconds: float) -> None:
        """Drafting that nothing hid, after a pass with (or without) drafting beside it."""
        self._unhidden[is_ahead] = _faded(self._unhidden[is_ahead], seconds)

    def record_pass(self, is_ahead: bool, seconds: float, usual_seconds: float) -> None:
        """usual_seconds: of such a pass without drafting beside it."""
        if self.is_on_trial:
            ratio = seconds / usual_seconds
            self._slowdown = _faded(self._slowdown, ratio if is_ahead else self.slowdown / ratio)

    def next_is_ahead(self, rate: float, pass_seconds: float) -> bool:
        """For the pass that is about to begin, with so many tokens per second so far."""
        drafting = _mean(self._unhidden[False])
        least = _LEAST_GAIN * (drafting + pass_seconds)
        gain = drafting - _mean(self._unhidden[True]) - (self.slowdown - 1.0) * pass_seconds
        is_tried = self._slowdown[0] > 0.0
        self._uses_ahead = is_tried and gain > (0.0 if self._uses_ahead else least)
        self._credit += _CREDIT_SHARE * rate * (drafting + pass_seconds)
        loss = max(rate * abs(gain) if is_tried else 0.0, _LEAST_STAKE)
        self.is_on_trial = self._credit >= loss and (self._uses_ahead or drafting > least)
        if self.is_on_trial:
            self._credit = 0.0
        return self._uses_ahead != self.is_on_trial


def _faded(sums: tuple[float, float], value: float) -> tuple[float, float]:
    n, total = sums
    return RECENT * n + 1.0, RECENT * total + value


def _mean(sums: tuple[float, float]) -> float:
    n, total = sums
    return total / n if n else 0.0
