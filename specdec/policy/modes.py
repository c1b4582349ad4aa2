"""DraftChoice: choose the mode of decoding, with the draft model or without it.

The mode in use is the one with more tokens per second, by its measured steps. A draft that is not
in use is tried within an exploration budget, which grows by a small share of the emitted tokens and
is charged with the tokens that trials lose. So a draft that never pays costs that share and its
first budget, however promising it looks and whatever makes it slow (Wu et al. 2016, Conservative
bandits).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from specdec.policy.moving_average import LASTING, MovingAverage, saved_numbers

_BUDGET_SHARE = 0.015
"""Share of a sequence's tokens, those of n-grams left out, that trials of a draft not in use may
lose: a draft that never pays keeps 0.98 of a long sequence's speed, and one that becomes good is in
use after some 100 tokens."""
FIRST_BUDGET = 2.0
"""Initial exploration budget, in tokens: losing 3.2 of 64 would cost 5 % of the speed; the margin
is for a last trial that overdraws."""
_MIN_TRIAL_COST = 0.5
"""Minimum tokens that a trial is charged with
(bench/scenarios: with a twenty-fifth of it, 0.90 of the speed over 64 tokens of noisy passes)."""
_PLAN_WEIGHT = 4.0
"""Weight of the plan's expectation, in steps (bench/scenarios: 0.99 of the speed with one)."""


class Outcome(NamedTuple):
    """Tokens and seconds of one sequence's part of a step.

    extra_seconds: additional time for computing tokens that the draft's cache lacked.
    ngram_tokens: draft tokens that would have been accepted without the draft model, as n-grams
        proposed them too.
    ngram_seconds: time of the n-grams' nodes in the pass.
    """

    n_tokens: float
    seconds: float
    extra_seconds: float = 0.0
    ngram_tokens: float = 0.0
    ngram_seconds: float = 0.0


class DraftChoice:
    """Choice between decoding with the draft model and without it.

    N-grams are not part of the comparison: their gain varies, and one lucky passage would make a
    good draft look slow. So tokens that n-grams alone would have brought in a step with the draft,
    and their time in its pass, are left out: a useless draft is not credited with them.

    Args:
        with_draft: planned (tokens, seconds) of a step; None without a draft model.
        plain_seconds: planned seconds of a pass of one token; updated by the caller.
    """

    def __init__(self, with_draft: tuple[float, float] | None, plain_seconds: float) -> None:
        # Same decay as the draft's mean, so that both follow a change at the same pace.
        self._plain = MovingAverage(LASTING, (plain_seconds,), _PLAN_WEIGHT)
        self._draft = None
        self._ngram = MovingAverage(LASTING, (0.0, 0.0), _PLAN_WEIGHT)  # part of n-grams in it
        if with_draft is not None:
            self._draft = MovingAverage(LASTING, with_draft, _PLAN_WEIGHT)
        self._budget = FIRST_BUDGET
        self.plain_seconds = plain_seconds

    @property
    def is_draft_better(self) -> bool:
        """Whether the draft is faster by its measured steps, whatever its budget is."""
        if self._draft is None:
            return False
        (tokens, seconds), (ngram_tokens, ngram_seconds) = self._draft.means, self._ngram.means
        return tokens - ngram_tokens > self._plain_rate * (seconds - ngram_seconds)

    @property
    def rate(self) -> float:
        """Tokens per second of the better mode: the throughput price."""
        if self._draft is None or not self.is_draft_better:
            return self._plain_rate
        tokens, seconds = self._draft.means
        return tokens / max(seconds, 1e-9)

    def state_dict(self) -> dict[str, Any]:
        return {
            "plain": self._plain.state_dict(),
            "draft": None if self._draft is None else self._draft.state_dict(),
            "ngram": self._ngram.state_dict(),
            "budget": self._budget,
        }

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore another process's state, weighted like the plan's. Raises ValueError."""
        self._plain.load_state_dict(state_dict["plain"])
        if self._draft is not None:
            self._draft.load_state_dict(state_dict["draft"])
        self._ngram.load_state_dict(state_dict["ngram"])
        budget = float(saved_numbers(state_dict["budget"], ()))
        self._budget = min(max(budget, -FIRST_BUDGET), _PLAN_WEIGHT * FIRST_BUDGET)

    def next_uses_draft(self, draft_seconds: float) -> bool:
        """Return whether the next step uses the draft.

        draft_seconds: seconds of the smallest step with the draft beyond a plain pass.
        """
        if self._draft is None:
            return False
        price = draft_seconds / self.plain_seconds
        if not self.is_draft_better:
            # Earlier gains do not raise the loss that a trial may make.
            self._budget = min(self._budget, max(FIRST_BUDGET, price))
            price = max(_MIN_TRIAL_COST, price)
        return self._budget >= price

    def record(self, uses_draft: bool, outcome: Outcome, num_seqs: int = 1) -> None:
        """Record a step of `num_seqs` sequences that share this choice: their mean outcome."""
        is_trial, rate = not self.is_draft_better, self.rate
        self._plain.add(self.plain_seconds, n=num_seqs)
        tokens = outcome.n_tokens - outcome.ngram_tokens
        self._budget += _BUDGET_SHARE * tokens
        if self._draft is None or not uses_draft:
            return
        self._draft.add(outcome.n_tokens, outcome.seconds, n=num_seqs)
        self._ngram.add(outcome.ngram_tokens, outcome.ngram_seconds, n=num_seqs)
        seconds = outcome.seconds + outcome.extra_seconds - outcome.ngram_seconds
        gain = tokens - seconds / self.plain_seconds
        if is_trial and tokens <= seconds * rate:
            gain = min(gain, -_MIN_TRIAL_COST)
        self._budget = max(self._budget + gain, -FIRST_BUDGET)

    @property
    def _plain_rate(self) -> float:
        return 1.0 / max(self._plain.means[0], 1e-9)
