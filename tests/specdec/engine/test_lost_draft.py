"""A draft whose tokens are hardly accepted is left out between two requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from budget_changes import grow

import specdec
from bench.checks.useless_head import save_random_head
from offload.storage.direct_io import StorageError
from offload.units import MIB
from specdec.config import SpecConfig
from specdec.drafters.ngram import NgramDrafter
from specdec.engine import lost_draft
from specdec.engine.lost_draft import MIN_RUNS, MIN_TOKENS, LostDraft
from specdec.planning import search
from specdec.policy.cost_model import CostModel
from specdec.run_options import CUDA, RunOptions

PROMPT = "def add(a, b):\n    return a"
ASKED: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "cache_prompt": False}
SIZES: dict[str, Any] = {"ctx_size": 256, "parallel": 4}


def request_of(
    num_tokens: int,
    num_accepted: int,
    *,
    num_runs: int = MIN_RUNS,
    drafters: Any = ("draft",),
    num_beams: int = 1,
) -> Any:
    """Return a finished request with one token per pass, and accepted tokens of the draft."""
    stats = SimpleNamespace(
        generated_tokens=num_tokens,
        passes=num_tokens - num_accepted,
        draft_runs=num_runs,
        accepted_tokens=num_accepted + 7,
        ngram_hits=7,
    )
    return SimpleNamespace(
        recorder=SimpleNamespace(stats=lambda: stats),
        spec=SimpleNamespace(drafters=drafters),
        params=SimpleNamespace(num_beams=num_beams),
        drafter=None,
        is_replanned=False,
    )


class Models:
    """Loaded models on paper: a target that is 1.2 times as fast without the draft."""

    def __init__(
        self, device: str = "cpu", num_cached: int = 0, num_nodes: int = 63, **options: Any
    ) -> None:
        self.options = RunOptions("t", "d", **options)
        self.draft: Any = object()
        self.target = SimpleNamespace(set_pinned_bytes=lambda n_bytes: None)
        self.prefix_cache = SimpleNamespace(n_committed=num_cached)
        self.plan = plan_of(1.0, device)
        self.num_plans = self.num_loads = 0
        without = SimpleNamespace(
            plan=plan_of(1.2, device, num_nodes), options=self.options.without_draft()
        )

        def plan(*_: Any) -> Any:
            self.num_plans += 1
            return without

        planning = SimpleNamespace(
            takes_memory=False, without_draft=lambda: SimpleNamespace(plan=plan)
        )
        self.planned = SimpleNamespace(planning=planning)

    def load(self, planned: Any) -> None:
        self.num_loads += 1

    def num_loads_after(self, *requests: Any) -> int:
        lost, models = LostDraft(), self
        for request in requests:
            lost.note_finished(request)
        lost.check(models, self.load)  # type: ignore[arg-type]
        return self.num_loads


def plan_of(plain_tokens_per_second: float, device: str, num_nodes: int = 63) -> Any:
    """Return a plan; a cached token takes 0.1 s to compute again."""
    return SimpleNamespace(
        decoding=SimpleNamespace(plain_tokens_per_second=plain_tokens_per_second),
        placement=SimpleNamespace(n_moving_layers=3, resident_bytes=10**9),
        cost_model=CostModel(0.8, 0.0, 0.1),
        storage_bytes_per_second=1e9,
        n_draft_tokens=num_nodes,
        device=device,
        budget_bytes=1,
        budget_source="here",
    )


@pytest.mark.parametrize(
    ("num_accepted", "num_loads"), [(0, 1), (int(0.12 * MIN_TOKENS), 1), (MIN_TOKENS // 7, 0)]
)
def test_it_is_left_out_if_its_memory_is_worth_more(num_accepted: int, num_loads: int) -> None:
    request = request_of(MIN_TOKENS, num_accepted)
    assert Models().num_loads_after(request) == num_loads


def test_too_little_is_known_at_first() -> None:
    assert Models().num_loads_after(request_of(MIN_TOKENS - 1, 0)) == 0
    assert Models().num_loads_after(request_of(MIN_TOKENS, 0, num_runs=MIN_RUNS - 1)) == 0
    half = request_of(MIN_TOKENS // 2, 0)
    assert Models().num_loads_after(half, half) == 1


def test_requests_without_the_draft_do_not_count() -> None:
    plain = request_of(10 * MIN_TOKENS, 0, drafters=("ngram",))
    assert Models().num_loads_after(plain) == 0
    beams = request_of(10 * MIN_TOKENS, 0, num_beams=4)
    assert Models().num_loads_after(beams) == 0
    good = request_of(2 * MIN_TOKENS, MIN_TOKENS)
    models = Models()
    assert models.num_loads_after(plain, beams, good) == 0
    assert models.num_plans == 0, "planning takes time"


def test_loading_again_takes_no_longer_than_was_lost() -> None:
    """The draft's memory took 43 s of 256 tokens, and loading takes a second."""
    request = request_of(MIN_TOKENS, 0)
    assert Models(num_cached=400).num_loads_after(request) == 1
    assert Models(num_cached=430).num_loads_after(request) == 0
    assert Models(num_cached=430).num_loads_after(request, request) == 1


def test_it_stays_where_requests_need_its_nodes() -> None:
    assert Models(num_nodes=62).num_loads_after(request_of(MIN_TOKENS, 0)) == 0


def test_it_stays_where_something_depends_on_it() -> None:
    request = request_of(MIN_TOKENS, 0)
    for models in (
        Models(spec_type="draft,ngram"),
        Models(num_draft_tokens=8),
        Models(accept_threshold=0.3),
        Models(device=CUDA),
    ):
        assert models.num_loads_after(request) == 0


def test_a_plan_is_compared_once() -> None:
    models, lost = Models(), LostDraft()
    lost.note_finished(request_of(MIN_TOKENS, MIN_TOKENS // 6))
    for _ in range(3):
        lost.check(models, models.load)  # type: ignore[arg-type]
    assert (models.num_plans, models.num_loads) == (1, 0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target that streams, and a head with random weights."""
    folder = tmp_path_factory.mktemp("grown")
    target = grow(folder / "model")
    (folder / "head").mkdir()
    return target, save_random_head(str(target), folder / "head")


@pytest.fixture(scope="module")
def expected(pair: tuple[Path, Path]) -> list[tuple[int, ...]]:
    with specdec.load(pair[0], **SIZES) as llm:
        return [llm.generate(prompt, **ASKED).token_ids for prompt in (PROMPT, "import os\n")]


@pytest.fixture
def loaded(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A run in which one short text is enough."""
    monkeypatch.setattr(lost_draft, "MIN_TOKENS", 16)
    monkeypatch.setattr(lost_draft, "MIN_RUNS", 1)
    monkeypatch.setattr(search, "PAYS_TO_LEAVE_OUT", 1e9)  # the plan has the draft
    monkeypatch.setattr(LostDraft, "_pays", lambda *_: True)  # loading takes longer than 24 tokens
    budget = specdec.plan_run(*pair, **SIZES).smallest_budget_bytes + 60 * MIB
    with specdec.load(*pair, memory_budget=budget, **SIZES) as llm:
        yield llm


def test_texts_are_the_same_without_it(
    loaded: Any, expected: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    first = loaded.generate(PROMPT, **ASKED)
    assert loaded.draft is not None
    assert first.stats.draft_runs > 0
    second = loaded.generate("import os\n", **ASKED)
    assert loaded.draft is None
    assert "draft" not in loaded.spec.drafters
    for spec_type in (("draft",), ("draft", "ngram")):
        for drafter in (None, NgramDrafter()):
            asked: dict[str, Any] = {"spec": SpecConfig(spec_type), "drafter": drafter, **ASKED}
            assert loaded.generate(PROMPT, **asked).token_ids == expected[0]
    assert second.stats.draft_runs == 0
    again = loaded.generate([PROMPT, "import os\n"], **ASKED)
    assert [first.token_ids, second.token_ids] == expected
    assert [result.token_ids for result in again] == expected
    (line,) = (line for line in caplog.messages if "of the draft alone" in line)
    assert line.endswith("--spec-type draft,ngram keeps it")
    loaded.set_memory_budget(loaded.plan.budget_bytes + 8 * MIB)
    assert loaded.generate(PROMPT, **ASKED).token_ids == expected[0]
    assert loaded.draft is None, "another budget does not bring it back"


def test_it_stays_while_a_request_runs(
    loaded: Any, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded.generate(PROMPT, **ASKED)
    check, calls = loaded.session.before_first, list[Any]()
    monkeypatch.setattr(loaded.session, "before_first", lambda: calls.append(loaded.draft))
    results = loaded.generate([PROMPT, "import os\n"], **ASKED)
    assert len(calls) == 1, "the second one joins the first"
    assert [result.token_ids for result in results] == expected
    assert loaded.draft is not None
    monkeypatch.setattr(loaded.session, "before_first", check)
    assert loaded.generate(PROMPT, **ASKED).token_ids == expected[0]
    assert loaded.draft is None


def test_a_run_goes_on_where_loading_fails(
    loaded: Any,
    expected: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loaded.generate(PROMPT, **ASKED)

    def fail(self: Any, *_: Any) -> None:
        raise StorageError("the disk is gone")

    monkeypatch.setattr(type(loaded.session), "load_again", fail)
    assert not loaded.session.has_left_out_draft
    for _ in range(2):
        assert loaded.generate("import os\n", **ASKED).token_ids == expected[1]
    assert loaded.draft is not None
    (line,) = (line for line in caplog.messages if "stays loaded" in line)
    assert line.endswith("the disk is gone")
    assert not loaded.session.has_left_out_draft
