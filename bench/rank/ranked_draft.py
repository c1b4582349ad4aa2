"""Result of one draft in a ranking, and comparison of two drafts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, stdev


@dataclass(frozen=True)
class RankedDraft:
    """Result of one candidate, or the reason why it cannot be used."""

    name: str
    """Name of a draft model; "none" is plain decoding, "ngram" n-grams alone."""
    problem: str | None = None
    """Reason why it was not measured; all results are then 0."""
    tokens_per_second: float = 0.0
    """Decode speed over all prompts: tokens after the first / seconds after the first."""
    predicted_tokens_per_second: float = 0.0
    """Prediction of the plan, before anything was measured."""
    mean_acceptance_length: float = 0.0
    """Tokens per pass, over all prompts."""
    draft_seconds: float = 0.0
    passes: int = 0
    generated_tokens: int = 0
    is_lossless: bool = True
    decode_seconds: float = 0.0
    seconds_per_token: tuple[float, ...] = ()
    """Decode seconds per token of each prompt; 0 if there is no token after the first."""

    def row(self) -> tuple[str, ...]:
        """Return the row of the table: name, results, remarks."""
        if self.problem is not None:
            return (self.name, "", "", "", "", f"cannot be used: {self.problem}")
        speeds = (self.tokens_per_second, self.predicted_tokens_per_second)
        return (
            self.name,
            f"{self.mean_acceptance_length:.2f}",
            f"{self.draft_seconds:.1f}",
            *(f"{speed:.2f}" for speed in speeds),
            "" if self.is_lossless else "LOSSY",
        )


@dataclass(frozen=True)
class Comparison:
    """Comparison of the fastest candidate with the next, prompt by prompt."""

    name: str
    """Name of the next."""
    lead: float
    """Mean over the prompts of log(its seconds per token / the fastest's)."""
    margin: float | None
    """Twice the standard error of `lead`; None if fewer than two prompts can be compared."""
    n_prompts: int

    @property
    def is_clear(self) -> bool:
        return self.margin is not None and self.lead > self.margin

    def line(self) -> str:
        text = f"next: {self.name}, {math.exp(self.lead):.2f} times the seconds per token"
        if self.margin is None:
            return f"{text}; a margin of noise takes more prompts: --n-prompts"
        low, high = (math.exp(self.lead + sign * self.margin) for sign in (-1, 1))
        remark = "" if self.is_clear else ": they cannot be told apart"
        return f"{text} ({low:.2f} to {high:.2f}, from {self.n_prompts} prompts){remark}"


def compare_speeds(best: RankedDraft, other: RankedDraft) -> Comparison:
    """Compare two candidates on the prompts for which both have a time."""
    leads = [
        math.log(theirs / ours)
        for ours, theirs in zip(best.seconds_per_token, other.seconds_per_token, strict=True)
        if ours and theirs
    ]
    margin = 2 * stdev(leads) / math.sqrt(len(leads)) if len(leads) > 1 else None
    return Comparison(other.name, fmean(leads) if leads else 0.0, margin, len(leads))
