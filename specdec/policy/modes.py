"""Which mode to decode in: with the draft model or without it.

The mode in use is the one that brings more for its seconds, by what its steps have shown. A draft
that is not in use is tried when it can pay for it: it has an exploration budget, which grows by a
small share of the text, and is charged with what it loses. So a draft that never pays costs that
share and its first budget, however promising it looks and whatever makes it slow (Wu et al. 2016,
Conservative bandits).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from specdec.policy.fading import LASTING, FadingMean, saved_numbers

_BUDGET_SHARE = 0.015
"""Of the text's tokens, that trials of a draft not in use may lose: with it a draft that never pays
keeps 0.98 of a long text's speed, and one that becomes good is in use after some 100 tokens."""
_FIRST_BUDGET = 2.0
"""Tokens that a draft may lose before it was ever right: a text of 64 keeps 0.95 of its speed with
a loss of 3.2, and steps overdraw a little."""
_MIN_TRIAL_COST = 0.5
"""Tokens that a trial is charged with, however little it loses
(bench/worlds: with a twenty-fifth of it, 0.90 of the speed over 64 tokens of noisy passes)."""
_PLAN_WEIGHT = 4.0
"""Steps that the plan's word for a way counts as (bench/worlds: 0.99 of the speed with one)."""


class Outcome(NamedTuple):
    """Of one text's part of a step.

    extra_seconds: beyond those, for having begun to use the draft again.
    """

    n_tokens: float
    seconds: float
    extra_seconds: float = 0.0


class DraftChoice:
    """With the draft model or without it.

    A draft is held to plain decoding, which is sure, where n-grams go on without it, too: what they
    bring scatters, and a lucky passage of theirs would make every step of a good draft a loss.

    Args:
        with_draft: (tokens, seconds) of a step as planned; None where there is no draft model.
        plain_seconds: of a pass of one token, as planned; to be kept up to date.
    """

    def __init__(self, with_draft: tuple[float, float] | None, plain_seconds: float) -> None:
        # It fades as what is known of the draft does: both follow a change at the same pace.
        self._plain = FadingMean(LASTING, (plain_seconds,), _PLAN_WEIGHT)
        self._draft = None
        if with_draft is not None:
            self._draft = FadingMean(LASTING, with_draft, _PLAN_WEIGHT)
        self._budget = _FIRST_BUDGET
        self.plain_seconds = plain_seconds

    @property
    def is_draft_better(self) -> bool:
        """By what is known; one that has no budget left rests all the same."""
        return self._draft is not None and self.rate > self._plain_rate

    @property
    def rate(self) -> float:
        """Tokens per second of the better way: what a second is worth."""
        if self._draft is None:
            return self._plain_rate
        tokens, seconds = self._draft.means
        return max(self._plain_rate, tokens / max(seconds, 1e-9))

    def cached(self) -> dict[str, Any]:
        return {
            "plain": self._plain.cached(),
            "draft": None if self._draft is None else self._draft.cached(),
            "budget": self._budget,
        }

    def restore(self, cached: Any) -> None:
        """What another process saw counts as much as the plan's word. Raises ValueError."""
        self._plain.restore(cached["plain"])
        if self._draft is not None:
            self._draft.restore(cached["draft"])
        budget = float(saved_numbers(cached["budget"], ()))
        self._budget = min(max(budget, -_FIRST_BUDGET), _PLAN_WEIGHT * _FIRST_BUDGET)

    def next_uses_draft(self, draft_seconds: float) -> bool:
        """For the next step.

        draft_seconds: what the smallest round with the draft takes beyond a plain pass.
        """
        if self._draft is None:
            return False
        price = draft_seconds / self.plain_seconds
        if not self.is_draft_better:
            # What it once won does not count for what a trial may lose.
            self._budget = min(self._budget, max(_FIRST_BUDGET, price))
            price = max(_MIN_TRIAL_COST, price)
        return self._budget >= price

    def record(self, uses_draft: bool, outcome: Outcome, num_seqs: int = 1) -> None:
        """A step of so many sequences, which share this choice, with the mean of their outcomes."""
        is_trial, rate = not self.is_draft_better, self.rate
        self._plain.add(self.plain_seconds, n=num_seqs)
        self._budget += _BUDGET_SHARE * outcome.n_tokens
        if self._draft is None or not uses_draft:
            return
        self._draft.add(outcome.n_tokens, outcome.seconds, n=num_seqs)
        seconds = outcome.seconds + outcome.extra_seconds
        gain = outcome.n_tokens - seconds / self.plain_seconds
        if is_trial and outcome.n_tokens <= seconds * rate:
            gain = min(gain, -_MIN_TRIAL_COST)
        self._budget = max(self._budget + gain, -_FIRST_BUDGET)

    @property
    def _plain_rate(self) -> float:
        return 1.0 / max(self._plain.means[0], 1e-9)
