"""Ranking of drafts for a target, measured on the user's own prompts.

Every candidate is loaded as a run would load it, in the same budget, and decodes the same prompts
with the same seed: no draft at all, n-grams alone, and each draft model. So the result includes the
memory that a draft takes from the target's layers. Each has processes of its own, so that none
finds less memory because of another one.

The machine drifts: every candidate decodes the first half of the prompts and then, in reverse
order, every one the second half. The remaining noise shows in the variance over prompts of the
ratio of two candidates, which gives the margin within which they do not differ clearly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import typer

from bench.process.child import KILLED, ChildFailed, measure_for_parent, result_of_child
from bench.rank.ranked_draft import Comparison, RankedDraft, compare_speeds
from bench.results import aggregate_stats
from bench.table import Table, text_of
from offload.errors import SpecdecError
from specdec.cli.progress import loading_progress, waiting
from specdec.config import SPEC_TYPES
from specdec.metrics.stats import ratio

PLAIN, NGRAM = "none", "ngram"
_TOTALS = (
    *("tokens_per_second", "decode_seconds", "mean_acceptance_length", "draft_seconds"),
    *("passes", "generated_tokens", "is_lossless"),
)
"""Fields of a `RankedDraft` that bench.results has under the same names."""


class RankingError(SpecdecError):
    """Error of the target: the ranking cannot be made."""


@dataclass(frozen=True)
class Candidate:
    """Specification of one measurement; plain values, so that it can be passed to a process."""

    name: str
    load: dict[str, Any]
    """Keywords of `specdec.load`."""
    prompts: list[str]
    sampling: dict[str, Any]
    """Options of SamplingParams."""

    @property
    def has_draft_model(self) -> bool:
        return self.load["draft_model"] is not None


@dataclass(frozen=True)
class Measured:
    """Results of one process for a candidate."""

    problem: str | None = None
    """Reason why it cannot be used."""
    predicted_tokens_per_second: float = 0.0
    stats: Sequence[dict[str, Any]] = ()
    """Values of each prompt's `GenerationStats`."""


@dataclass(frozen=True)
class Ranking:
    """Candidates, fastest first; unusable ones last."""

    model: str
    n_prompts: int
    max_tokens: int
    plain_tokens_per_second: float
    candidates: tuple[RankedDraft, ...]

    @property
    def best(self) -> RankedDraft:
        return self.candidates[0]

    @property
    def next_best(self) -> Comparison | None:
        """Return the comparison with the second one; None if there is no other usable one."""
        usable = [candidate for candidate in self.candidates[1:] if candidate.problem is None]
        return compare_speeds(self.best, usable[0]) if usable else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "n_prompts": self.n_prompts,
            "max_tokens": self.max_tokens,
            "best": self.best.name,
            "next_best": self.next_best and asdict(self.next_best),
            "candidates": [asdict(candidate) for candidate in self.candidates],
        }

    def lines(self) -> list[str]:
        """Return a table, and the best candidate below it."""
        columns = ("draft", "tokens/pass", "draft s", "tok/s", "predicted", "")
        table = Table("", columns, tuple(candidate.row() for candidate in self.candidates))
        speedup = ratio(self.best.tokens_per_second, self.plain_tokens_per_second)
        last = [f"best: {self.best.name}, {speedup:.2f}x plain decoding"]
        if self.next_best is not None:
            last.append(self.next_best.line())
        return [*text_of([table]).splitlines(), *last]


Measure = Callable[[Candidate], Measured]


def rank_drafts(
    model: str,
    drafts: Sequence[str],
    prompts: Sequence[str],
    measure: Measure,
    *,
    max_tokens: int,
    load_options: Mapping[str, Any],
    sampling: Mapping[str, Any],
) -> Ranking:
    """Measure plain decoding, n-grams and every draft on the prompts.

    Args:
        model: the target; drafts: names of draft models; one that cannot be used with this target
            or budget is listed with the reason.
        prompts: at least one; max_tokens: new tokens for each of them.
        measure: `measure_in_child`, or `measure_here`.
        load_options: further keywords of `specdec.load` for every candidate; spec_type is that of
            the draft models, which are measured even if a plan would leave them out.
        sampling: options of SamplingParams; seed 0 unless it has one.

    Raises:
        RankingError: the target cannot be used, with or without a draft.
    """
    with_draft = load_options.get("spec_type") or SPEC_TYPES
    kinds: list[tuple[str, str | None, Any]] = [
        (PLAIN, None, ()),
        (NGRAM, None, (NGRAM,)),
        *((name, name, with_draft) for name in dict.fromkeys(drafts)),
    ]
    candidates = []
    for name, draft_model, spec_type in kinds:
        own = {"model": model, "draft_model": draft_model, "spec_type": spec_type}
        options = {"seed": 0, **sampling, "max_tokens": max_tokens}
        candidates.append(Candidate(name, {**load_options, **own}, list(prompts), options))
    ranked = _in_turns(candidates, measure)
    plain = ranked[0].tokens_per_second
    ranked.sort(key=lambda item: (item.problem is not None, -item.tokens_per_second))
    return Ranking(model, len(prompts), max_tokens, plain, tuple(ranked))


def _in_turns(candidates: Sequence[Candidate], measure: Measure) -> list[RankedDraft]:
    """Measure each on half of the prompts, then in reverse order on the other half."""
    measured: dict[str, list[Measured]] = {candidate.name: [] for candidate in candidates}
    n_prompts = len(candidates[0].prompts)
    half = (n_prompts + 1) // 2
    for part, order in ((slice(half), candidates), (slice(half, None), candidates[::-1])):
        for candidate in order:
            prompts, before = candidate.prompts[part], measured[candidate.name]
            if not prompts or (before and before[-1].problem is not None):
                continue
            before.append(measure(replace(candidate, prompts=prompts)))
            problem = before[-1].problem
            if problem is not None and not candidate.has_draft_model:
                raise RankingError(problem)
    return [figures_of(name, halves) for name, halves in measured.items()]


def measure_here(candidate: Candidate) -> Measured:
    """Load the candidate in this process and decode the prompts; or return why it cannot."""
    from specdec.api import load

    title = f"loading {candidate.load['model']} for {candidate.name}"
    try:
        with loading_progress(title) as progress:
            llm = load(**candidate.load, progress=progress)
        with llm:
            with waiting(f"measuring {candidate.name}"):
                results = [llm.generate(text, **candidate.sampling) for text in candidate.prompts]
            stats = [result.stats.to_dict() for result in results]
            return Measured(None, llm.plan.predicted_tokens_per_second, stats)
    except SpecdecError as error:
        return Measured(str(error))


def measure_in_child(candidate: Candidate, *, enforce: bool = False) -> Measured:
    """Measure in a process of its own, inside a cgroup of the memory budget if enforced.

    Raises RankingError if it ends without a result; it has printed its error on stderr.
    """
    limit = candidate.load["memory_budget"] if enforce else None
    try:
        return Measured(**result_of_child("bench.rank.ranking", candidate, limit))
    except ChildFailed as error:
        raise RankingError(f"measuring {candidate.name}: {error}") from None
    except typer.Exit as stop:
        if stop.exit_code != KILLED:
            raise
        return Measured("killed by the kernel, at the memory limit: give it a larger budget")


def figures_of(name: str, halves: Sequence[Measured]) -> RankedDraft:
    """Return totals over the prompts, not means of rates; a problem of one half is the result."""
    if halves[-1].problem is not None:
        return RankedDraft(name, problem=halves[-1].problem)
    stats = [stat for half in halves for stat in half.stats]
    totals = aggregate_stats([{"stats": stat} for stat in stats])
    return RankedDraft(
        name,
        predicted_tokens_per_second=halves[0].predicted_tokens_per_second,
        seconds_per_token=tuple(
            ratio(stat["decode_seconds"], stat["generated_tokens"] - 1) for stat in stats
        ),
        **{key: totals[key] for key in _TOTALS},
    )


if __name__ == "__main__":
    sys.exit(
        measure_for_parent(sys.argv[1:], lambda values: asdict(measure_here(Candidate(**values))))
    )
