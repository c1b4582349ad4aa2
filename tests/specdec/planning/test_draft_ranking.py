"""The draft that -md auto takes: the most tokens per second that are expected, and why."""

from __future__ import annotations

from typing import Any

import pytest
from paper_models import PaperModel

from backends.contract.curve import ComputeCurve
from backends.heads.kinds import DFLASH, MTP
from offload.errors import SpecdecError
from offload.units import GIB, MIB
from specdec.models.drafts import MODEL, NGRAM, DraftCandidate
from specdec.models.eval_results import EvalResults
from specdec.models.opened import SourcePair
from specdec.planning import saved_statistics
from specdec.planning.draft_ranking import ASSUMED_GAINS, PlannedCandidate, ranked_draft
from specdec.planning.measurements import Measurements
from specdec.planning.plan import make_plan
from specdec.policy.pair_statistics import pair_statistics_of
from specdec.run_options import RunOptions

CURVE = ComputeCurve.linear(1e-12, 1e-15)
NGRAMS = DraftCandidate(None, NGRAM, "")


class Named(PaperModel):
    """A paper model that statistics can be saved of."""

    def fingerprint(self) -> str:
        return self.layers[0].tensors[0].name


TARGET = Named("t", 40, 40 * MIB, kv_bytes_per_token=1000, curve=CURVE)
DRAFTS = {
    name: Named(name, 4, n_bytes, kv_bytes_per_token=100, curve=CURVE)
    for name, n_bytes in {"small": MIB, "other": MIB, "large": 300 * MIB}.items()
}


@pytest.fixture(autouse=True)
def saved(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Contents of statistics files by path; empty."""
    files: dict[str, Any] = {}
    monkeypatch.setattr(saved_statistics, "load_cached", lambda path: files.get(path.name))
    return files


def plan(options: RunOptions) -> PlannedCandidate:
    draft = None if options.draft is None else DRAFTS.get(str(options.draft))
    if options.draft is not None and draft is None:
        raise SpecdecError(f"{options.draft} does not fit")
    pair = SourcePair((TARGET, draft))
    compute = None if draft is None else draft.measure_compute()
    measurements = Measurements(1e9, TARGET.measure_compute(), compute)
    result = make_plan(options, pair, measurements, 2 * GIB + 512 * MIB, "as asked", 0)
    return PlannedCandidate(result, pair.sources, measurements)


def ranked(*candidates: DraftCandidate, **options: Any) -> Any:
    asked = RunOptions("t", "auto", ctx_size=256, **options)
    return ranked_draft(asked, [NGRAMS, *candidates], plan)


def candidate(name: str, tokens_per_pass: float | None = None, kind: str = MODEL) -> Any:
    results = None
    if tokens_per_pass is not None:
        results = EvalResults(0.5, tokens_per_pass, 8, 100, ("text",), "t", "0" * 16)
    return DraftCandidate(name, kind, f"{name} is here", results)


def test_a_draft_that_pays_is_taken_before_n_grams() -> None:
    choice = ranked(candidate("small"))
    assert choice.name == "small"
    assert choice.line.startswith("the draft is small: small is here, accepted tokens assumed; ")
    assert "tokens/s expected, n-grams alone " in choice.line


def test_figures_of_training_decide() -> None:
    choice = ranked(candidate("small", 1.9), candidate("other", 3.1))
    assert choice.name == "other"
    assert "3.10 tokens per pass with chains of 8 on text held out of its training" in choice.line
    assert ranked(candidate("small", 3.1), candidate("other", 1.9)).name == "small"


def test_the_kind_decides_where_there_are_no_figures() -> None:
    assert ASSUMED_GAINS[DFLASH] > ASSUMED_GAINS[MTP]
    choice = ranked(candidate("small", kind=MTP), candidate("other", kind=DFLASH))
    assert choice.name == "other"


def test_of_models_that_nothing_is_known_of_the_largest_is_compared() -> None:
    choice = ranked(candidate("other"), candidate("small"))  # in the order of their sizes
    assert choice.name == "other"
    assert "small" not in choice.line
    assert ranked(candidate("other"), candidate("small", 3.1)).name == "small"


def test_figures_count_more_than_the_kind() -> None:
    bad = candidate("other", 1.2, kind=DFLASH)
    assert ranked(candidate("small"), bad).name == "small"


def test_n_grams_are_taken_before_a_draft_that_is_hardly_right() -> None:
    choice = ranked(candidate("small", 1.05))
    assert choice.name is None
    assert choice.line.startswith("n-grams draft: accepted tokens assumed; ")
    assert ", small " in choice.line


def test_a_draft_that_a_plan_leaves_out_comes_last() -> None:
    choice = ranked(candidate("large"))
    assert choice.name is None
    assert choice.line.endswith("large left out")


def test_earlier_runs_count_most(saved: dict[str, Any]) -> None:
    rivals = candidate("small", 3.0), candidate("other", 2.0)
    assert ranked(*rivals).name == "small"
    asked = RunOptions("t", "other", ctx_size=256)
    planned = plan(asked)
    sources = [source for source in planned.sources if source is not None]
    file = saved_statistics.SavedStatistics(planned.plan, sources)
    known = pair_statistics_of(planned.plan.cost_model, planned.plan.draft_cost_model, 16)
    state_dict = known.state_dict()
    choice: dict[str, Any] = {"plain": [40.0, 40.0], "draft": [40.0, 40 * 7.5, 44.0]}
    state_dict["acceptance"] = {"greedy": {"choices": {"1": choice}}}
    saved[file._path.name] = state_dict
    chosen = ranked(*rivals)
    assert chosen.name == "other"
    assert "7.50 tokens per pass in earlier runs" in chosen.line
    choice["draft"] = [40.0, 40 * 1.1, 60.0]
    assert ranked(*rivals).name == "small"
    choice["draft"] = [5.0, 5 * 9.5, 5.0]  # hardly more than the plan's own estimate
    assert ranked(*rivals).name == "small"
    for broken in ("x", None, [1.0], [float("nan")] * 3):
        choice["draft"] = broken
        assert ranked(*rivals).name == "small"


def test_a_draft_that_cannot_run_is_left_out_in_one_line(caplog) -> None:
    choice = ranked(candidate("misfit"), candidate("small"))
    assert choice.name == "small"
    assert "misfit is left out: misfit does not fit" in caplog.text


def test_n_grams_are_no_choice_where_a_draft_is_required() -> None:
    assert ranked(candidate("small", 1.05), spec_type="draft,ngram").name == "small"
    assert ranked(candidate("misfit"), spec_type="draft").name == "misfit"  # loading says why


def test_without_drafts_nothing_is_planned() -> None:
    asked = RunOptions("t", "auto")
    lonely = DraftCandidate(None, NGRAM, "download something")
    choice = ranked_draft(asked, [lonely], lambda _: pytest.fail("planned"))
    assert choice == (None, "n-grams draft: download something")
