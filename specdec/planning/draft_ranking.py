"""The draft that -md auto takes: the candidate with the most tokens per second that are expected.

Each candidate is planned as a run with it would be. The plan has the seconds of passes and of
drafting; accepted tokens come from, in this order,

- saved statistics of earlier runs with this draft: its speedup over plain decoding;
- eval_results.json beside its weights: tokens per pass of chains on text held out of its training;
- ASSUMED_GAINS, by its kind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from backends.contract.source import ModelSource
from backends.heads.kinds import ASSISTANT, DFLASH, EAGLE3, MTP
from offload.errors import SpecdecError
from specdec.models.drafts import MODEL, NGRAM, DraftCandidate
from specdec.models.eval_results import EvalResults
from specdec.planning.measurements import Measurements
from specdec.planning.run_plan import RunPlan
from specdec.planning.saved_statistics import SavedStatistics
from specdec.planning.search import predict
from specdec.policy.assumptions import ASSUMED_NGRAM_SHARE, OBSERVED_AGREEMENT
from specdec.run_options import RunOptions

logger = logging.getLogger(__name__)
ASSUMED_GAINS = {
    # The assumed tokens per pass are those of such a draft (specdec/policy/assumptions.py).
    MODEL: 1.0,
    # As a small model's: no figure of trees is published. pair:mtp, trained for half an hour, has
    # 0.57 to 0.66 of pair:draft's (docs/benchmarks.md).
    MTP: 1.0,
    ASSISTANT: 1.0,
    # Published tokens per pass for Qwen3-8B: EAGLE-3 trees 4.1, DFlash chains 6.9 (DDTree, arXiv
    # 2604.12989), beside 3.64 of a small model's trees of 64 nodes.
    EAGLE3: 1.2,
    DFLASH: 2.2,
    NGRAM: ASSUMED_NGRAM_SHARE,
}
"""Accepted draft tokens of a tree by kind of draft, in multiples of a small model's."""
_MAX_SHOWN = 3


class PlannedCandidate(NamedTuple):
    """The plan of a run with a candidate, and what it was made from."""

    plan: RunPlan
    sources: tuple[ModelSource, ModelSource | None]
    measurements: Measurements


class RankedDraft(NamedTuple):
    """A choice of -md auto. name: None for n-grams alone; line: says which and why."""

    name: str | None
    line: str


class _Rated(NamedTuple):
    candidate: DraftCandidate
    tokens_per_second: float
    figure: str
    """Source of its accepted tokens, for the user."""
    is_assumed: bool = False

    @property
    def speed(self) -> str:
        speed = f"{self.tokens_per_second:.3g}" if self.tokens_per_second else "left out"
        return f"{self.candidate.name or 'n-grams alone'} {speed}"


def ranked_draft(
    options: RunOptions,
    candidates: Sequence[DraftCandidate],
    plan: Callable[[RunOptions], PlannedCandidate],
) -> RankedDraft:
    """Choose the candidate with the most expected tokens per second; log those that cannot run.

    candidates: n-grams alone first, which are chosen among equals: they take no memory.
    plan: plans a run. Raises SpecdecError.
    """
    ngrams, *drafts = candidates
    if not drafts:
        return RankedDraft(None, f"n-grams draft: {ngrams.description}")
    rated = []
    for candidate in drafts if options.requires_draft else candidates:
        asked = options.without_draft()
        if candidate.name is not None:
            asked = replace(options, draft_model=candidate.name)
        try:
            rated.append(_rate(candidate, asked, plan(asked)))
        except SpecdecError as error:
            if candidate.name is None:
                return RankedDraft(None, "n-grams draft: the target alone has no plan")
            logger.warning(f"{candidate.name} is left out: {error}")
    if not rated:
        first = drafts[0]
        return RankedDraft(first.name, f"the draft is {first.name}: {first.description}")
    best, *rivals = sorted(_without_guesses(rated), key=lambda item: -item.tokens_per_second)
    return RankedDraft(best.candidate.name, _line(best, rivals[:_MAX_SHOWN]))


def _without_guesses(rated: Sequence[_Rated]) -> list[_Rated]:
    """Leave out models that nothing is known of, except the first, which is the largest: with the
    same assumption the smallest one would always win."""
    unknown = [item for item in rated if item.candidate.kind == MODEL and item.is_assumed]
    return [item for item in rated if item not in unknown[1:]]


def _rate(candidate: DraftCandidate, options: RunOptions, planned: PlannedCandidate) -> _Rated:
    """Return the tokens per second that are expected with a candidate."""
    chosen, sources = planned.plan.chosen, planned.sources
    if candidate.name is not None and chosen.draft is None:
        return _Rated(candidate, 0.0, "there is better use for its memory")
    models = [source for source in sources if source is not None]
    speedup = SavedStatistics(planned.plan, models).pair_statistics.saved_speedup()
    if candidate.name is not None and speedup is not None:
        figure = f"{speedup.tokens_per_pass:.2f} tokens per pass in earlier runs"
        return _Rated(candidate, speedup.relative * chosen.plain_tokens_per_second, figure)
    gain, figure = ASSUMED_GAINS[candidate.kind], "accepted tokens assumed"
    if candidate.results is not None:
        gain, figure = _gain_of(candidate.results), _figure_of(candidate.results)
    predicted = predict(
        chosen.memory_plan, planned.measurements, options.spec, gain=gain
    ).better_tokens_per_second
    return _Rated(candidate, predicted, figure, is_assumed=candidate.results is None)


def _gain_of(results: EvalResults) -> float:
    """Return the draft tokens of greedy chains, in multiples of those of the assumed draft."""
    levels = range(1, results.num_draft_tokens + 1)
    return (results.tokens_per_pass - 1) / sum(OBSERVED_AGREEMENT**level for level in levels)


def _figure_of(results: EvalResults) -> str:
    return (
        f"{results.tokens_per_pass:.2f} tokens per pass with chains of {results.num_draft_tokens} "
        "on text held out of its training"
    )


def _line(best: _Rated, rivals: Sequence[_Rated]) -> str:
    candidate = best.candidate
    named = "n-grams draft" if candidate.name is None else f"the draft is {candidate.name}"
    reasons = [reason for reason in (candidate.description, best.figure) if reason]
    speeds = [f"{best.tokens_per_second:.3g} tokens/s expected"]
    speeds += [item.speed for item in rivals]
    return f"{named}: {', '.join(reasons)}; {', '.join(speeds)}"
