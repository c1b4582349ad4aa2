"""Which draft serves a target best: measured on the user's own prompts, not guessed.

Every candidate is loaded as a run would load it, one after the other in the same budget, and
decodes the same prompts with the same seed: no draft at all, n-grams alone, and each draft model.
What a draft's memory takes from the target's layers is thereby part of the outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

from offload.errors import SpecdecError
from specdec.api import load
from specdec.prompt_files import Prompt
from specdec.stats import GenerationStats, ratio

PLAIN, NGRAM = "none", "ngram"
Loading = Callable[[str], AbstractContextManager[Any]]
"""Name of a candidate -> the progress of its load, as `specdec.load` takes it."""


@dataclass(frozen=True)
class RankedDraft:
    """How one candidate did, or why it cannot be used."""

    name: str
    """A draft model's name; "none" is plain decoding, "ngram" n-grams alone."""
    problem: str | None = None
    """Why it was not measured; all figures are then 0."""
    tokens_per_second: float = 0.0
    """Decode only, over all prompts: tokens after the first / seconds after the first."""
    predicted_tokens_per_second: float = 0.0
    """What the plan expected before anything was measured."""
    mean_acceptance_length: float = 0.0
    """Tokens per pass, over all prompts."""
    draft_seconds: float = 0.0
    passes: int = 0
    generated_tokens: int = 0
    is_lossless: bool = True


@dataclass(frozen=True)
class Ranking:
    """The candidates, fastest first; those that cannot be used come last."""

    model: str
    n_prompts: int
    max_tokens: int
    plain_tokens_per_second: float
    candidates: tuple[RankedDraft, ...]

    @property
    def best(self) -> RankedDraft:
        return self.candidates[0]

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "n_prompts": self.n_prompts,
            "max_tokens": self.max_tokens,
            "best": self.best.name,
            "candidates": [asdict(candidate) for candidate in self.candidates],
        }

    def lines(self) -> list[str]:
        """A table, and the best one below it."""
        width = max(len("draft"), *(len(one.name) for one in self.candidates))
        heading = f"{'draft':<{width}}  tokens/pass  draft s  tok/s  predicted"
        rows = [f"{one.name:<{width}}  {_figures(one)}" for one in self.candidates]
        speedup = ratio(self.best.tokens_per_second, self.plain_tokens_per_second)
        return [heading, *rows, f"best: {self.best.name}, {speedup:.2f}x plain decoding"]


def rank_drafts(
    model: str,
    drafts: Sequence[str],
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    loading: Loading,
    load_options: Mapping[str, Any],
    sampling: Mapping[str, Any],
) -> Ranking:
    """Measure plain decoding, n-grams and every draft on the prompts.

    Args:
        model: the target; drafts: names of draft models; one that cannot be used with this target
            or this budget is listed with the reason.
        prompts: at least one; max_tokens: new tokens for each of them.
        loading: shows the progress of a load.
        load_options: keywords of `specdec.load` for every candidate, without the draft; spec_type
            is that of the draft models.
        sampling: options of SamplingParams; seed 0 unless it has one.

    Raises:
        SpecdecError: the target cannot be loaded, or a generation fails.
    """
    candidates = [
        (PLAIN, None, ()),
        (NGRAM, None, (NGRAM,)),
        *((name, name, load_options.get("spec_type")) for name in dict.fromkeys(drafts)),
    ]
    options = {"seed": 0, **sampling, "max_tokens": max_tokens}
    found = []
    for name, draft_model, spec_type in candidates:
        keywords = {**load_options, "draft_model": draft_model, "spec_type": spec_type}
        try:
            with loading(name) as progress:
                llm = load(model, **keywords, progress=progress)
        except SpecdecError as error:
            if draft_model is None:
                raise  # it is not a draft's fault
            found.append(RankedDraft(name, problem=str(error)))
            continue
        with llm:
            stats = [llm.generate(prompt.text, **options).stats for prompt in prompts]
            found.append(_figures_of(name, stats, llm.plan.predicted_tokens_per_second))
    plain = found[0].tokens_per_second
    found.sort(key=lambda one: (one.problem is not None, -one.tokens_per_second))
    return Ranking(model, len(prompts), max_tokens, plain, tuple(found))


def _figures_of(name: str, stats: Sequence[GenerationStats], predicted: float) -> RankedDraft:
    """Totals over the prompts, not means of rates."""
    passes = sum(one.passes for one in stats)
    n_decoded = sum(max(one.generated_tokens - 1, 0) for one in stats)
    return RankedDraft(
        name,
        tokens_per_second=ratio(n_decoded, sum(one.decode_seconds for one in stats)),
        predicted_tokens_per_second=predicted,
        mean_acceptance_length=1.0 + ratio(sum(one.accepted_tokens for one in stats), passes),
        draft_seconds=sum(one.draft_seconds for one in stats),
        passes=passes,
        generated_tokens=sum(one.generated_tokens for one in stats),
        is_lossless=all(one.is_lossless for one in stats),
    )


def _figures(one: RankedDraft) -> str:
    if one.problem is not None:
        return f"cannot be used: {one.problem}"
    figures = (
        f"{one.mean_acceptance_length:>11.2f}  {one.draft_seconds:>7.1f}  "
        f"{one.tokens_per_second:>5.2f}  {one.predicted_tokens_per_second:>9.2f}"
    )
    return figures if one.is_lossless else f"{figures}  LOSSY"
